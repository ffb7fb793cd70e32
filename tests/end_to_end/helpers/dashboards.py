"""Queries of the dashboards and alert rules, with their variables replaced."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
_COMPARED = re.compile(r"(.*\S) (?:==|>) [\d.]+")


def _quantiles(name: str) -> list[str]:
    rates = _rate(f"{name}_bucket")
    return [f"histogram_quantile({share}, sum by(le) ({rates}))" for share in ("0.99", "0.95", "0.9", "0.5")]


def _rate(name: str) -> str:
    return f'rate(vllm:{name}{{model_name="$model_name"}}[$__rate_interval])'


def _mean(name: str) -> str:
    return f"{_rate(f'{name}_sum')}\n/\n{_rate(f'{name}_count')}"


def _heatmap(name: str) -> str:
    return f'sum by(le) (increase(vllm:{name}_bucket{{model_name="$model_name"}}[$__rate_interval]))'


VLLM_PANELS: dict[str, list[str]] = {
    "E2E Request Latency": [*_quantiles("e2e_request_latency_seconds"), _mean("e2e_request_latency_seconds")],
    "Token Throughput": [_rate("prompt_tokens_total"), _rate("generation_tokens_total")],
    "Time Per Output Token Latency": [
        *_quantiles("time_per_output_token_seconds"),
        _mean("time_per_output_token_seconds"),
    ],
    "Inter Token Latency": [*_quantiles("inter_token_latency_seconds"), _mean("inter_token_latency_seconds")],
    "Scheduler State": [
        f'vllm:num_requests_{state}{{model_name="$model_name"}}' for state in ("running", "swapped", "waiting")
    ],
    "Time To First Token Latency": [*_quantiles("time_to_first_token_seconds"), _mean("time_to_first_token_seconds")],
    "Cache Utilization": [
        f'vllm:{cache}_cache_usage_perc{{model_name="$model_name"}}' for cache in ("gpu", "cpu", "kv")
    ],
    "Request Prompt Length": [_heatmap("request_prompt_tokens")],
    "Request Generation Length": [_heatmap("request_generation_tokens")],
    "Finish Reason": [
        'sum by(finished_reason) (increase(vllm:request_success_total{model_name="$model_name"}[$__rate_interval]))'
    ],
    "Queue Time": [_rate("request_queue_time_seconds_sum")],
    "Requests Prefill and Decode Time": [
        _rate("request_prefill_time_seconds_sum"),
        _rate("request_decode_time_seconds_sum"),
    ],
    "Max Generation Token in Sequence Group": [_rate("request_max_num_generation_tokens_sum")],
}
"""Panels of vLLM's dashboard (examples/online_serving/prometheus_grafana/grafana.json), and their queries. Its releases
differ in the names of the time between tokens and of the cache's use: all are here."""


def filled(query: str, model: str, window: str) -> str:
    """With the values that Grafana gives to variables. window: such as 15s."""
    return query.replace("$model_name", model).replace("$__rate_interval", window).replace("$instance", ".*")


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """(title of the panel, query) of our own dashboard."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def compared(expression: str) -> str:
    """An alert's expression without the comparison with its limit, so that it has a value also while all is well."""
    found = _COMPARED.fullmatch(expression)
    assert found, expression
    return found[1]
