"""Histograms and counters of a real server count exactly the requests that it was sent, and have what the queries of
dashboards and alert rules read."""

import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.end_to_end.helpers.batch_client import FINAL_STATUSES, BatchClient
from tests.end_to_end.helpers.dashboards import (
    DASHBOARD,
    DEPLOY,
    VLLM_PANELS,
    compared,
    dashboard_queries,
    filled,
)
from tests.end_to_end.helpers.promql import missing_series
from tests.end_to_end.helpers.scrape import Scrape, scrape
from tests.end_to_end.helpers.toka_process import TokaProcess, free_port, not_ready, starting_toka, wait_for
from tests.helpers.tiny_model import EOS_ID, save_tiny_model
from tokasaurus import __version__

FLAGS = (
    *("dtype=float32", "kv_cache_num_tokens=4096", "max_tokens_per_forward=64", "max_seqs_per_forward=8", "rl=T"),
    *("served_model_name=tiny", "vllm_metrics=T"),
)
ALERTS = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
LONG = 480
"""Tokens of a request that is cancelled or aborted before its end: some tenths of a second on an idle machine."""


@pytest.fixture(scope="module")
def toka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokaProcess]:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "llama")
    with starting_toka(free_port(), f"model={directory}", f"data_dir={directory / 'data'}", *FLAGS) as toka:
        with not_ready(toka.process.pid):  # an answer 503, for the rule about server errors
            wait_for(lambda: _status(f"{toka.url}/ready") == 503, 60)
        toka.wait_until_ready()
        yield toka
        assert toka.stop() == 0


def _status(url: str) -> int:
    """0 if nothing listens there."""
    try:
        return httpx.get(url, timeout=60).status_code
    except httpx.TransportError:
        return 0


def body(prompt: Any = "Once upon a time", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 5, "ignore_eos": True, "temperature": 0, **fields}


def post(toka: TokaProcess, fields: dict[str, Any], route: str = "/v1/completions") -> httpx.Response:
    return httpx.post(f"{toka.url}{route}", json=fields, timeout=120)


@dataclass
class Sent:
    """What the load was, as its sender counts it."""

    lengths: list[int]
    """Completion tokens of each sequence that finished."""
    prompts: list[int]
    """Prompt tokens of each request."""
    samples: list[int]
    """n of each request."""
    reasons: dict[str, int]
    answers: dict[tuple[str, str, str], int]


def send_load(toka: TokaProcess) -> Sent:
    """Whole, streamed, several prompts, n > 1, bulk, batch, stopped, refused, cancelled and aborted requests."""
    sent = Sent([], [], [], dict.fromkeys(("stop", "length", "abort", "error", "cancelled"), 0), {})

    def note(route: str, status: int, number: int = 1, method: str = "POST") -> None:
        sent.answers[method, route, str(status)] = sent.answers.get((method, route, str(status)), 0) + number

    def note_usage(usage: dict[str, int], prompts: list[str], n: int, reason: str = "length") -> None:
        num_sequences = len(prompts) * n
        assert usage["completion_tokens"] % num_sequences == 0, "sequences of one body are equally long here"
        sent.lengths.extend([usage["completion_tokens"] // num_sequences] * num_sequences)
        sent.prompts.extend([usage["prompt_tokens"] // len(prompts)] * len(prompts))
        sent.samples.extend([n] * len(prompts))
        sent.reasons[reason] += num_sequences

    whole: list[tuple[list[str], dict[str, Any]]] = [
        (["One"], {}),
        (["Two"], {"n": 3, "max_tokens": 7}),
        (["Three"] * 2, {"n": 2}),
        (["Four"], {"max_tokens": 1}),
        (["Five"], {"max_tokens": 0, "echo": True}),
    ]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda one: post(toka, body(one[0], **one[1])), whole))
    for (prompts, fields), answer in zip(whole, answers, strict=True):
        assert answer.status_code == 200, answer.text
        note("/v1/completions", 200)
        note_usage(answer.json()["usage"], prompts, fields.get("n", 1))

    answer = post(toka, body("Stop", n=2, ignore_eos=False, allowed_token_ids=[EOS_ID]))
    note("/v1/completions", 200)
    note_usage(answer.json()["usage"], ["Stop"], 2, "stop")

    fields = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "max_tokens": 6, "ignore_eos": True}
    streamed = post(
        toka,
        {**fields, "model": "tiny", "stream": True, "stream_options": {"include_usage": True}},
        "/chat/completions",
    )
    assert streamed.status_code == 200, streamed.text
    last = [line for line in streamed.text.splitlines() if line.startswith("data: {")][-1]
    note("/v1/chat/completions", 200)
    note_usage(json.loads(last.removeprefix("data: "))["usage"], ["Hi"], 2)

    lines = [{"custom_id": str(n), "url": "/v1/completions", "body": body(f"Line {n}", n=n)} for n in (1, 2)]
    lines.append({"custom_id": "bad", "url": "/v1/completions", "body": body(n=0)})
    content = "\n".join(map(json.dumps, lines)).encode()
    bulk = httpx.post(f"{toka.url}/v1/bulk", content=content, timeout=120)
    results = {line["custom_id"]: line["response"] for line in map(json.loads, bulk.text.splitlines())}
    note("/v1/bulk", 200)
    assert results["bad"]["status_code"] == 400
    for n in (1, 2):
        note_usage(results[str(n)]["body"]["usage"], ["a line"], n)

    batches = BatchClient(toka.url)
    file_id = batches.upload("\n".join(json.dumps({**line, "method": "POST"}) for line in lines[:2]).encode())
    batch = batches.wait(batches.create("/v1/completions", file_id)["id"], FINAL_STATUSES, 120)
    assert batch["request_counts"]["completed"] == 2, batch
    for line in batches.results(batch):
        note_usage(line["response"]["body"]["usage"], ["a line"], int(line["custom_id"]))

    for fields in ({"n": -1}, {"prompt": "x" * 4000}):
        assert post(toka, body() | fields).status_code == 400
        note("/v1/completions", 400)
    assert post(toka, body() | {"model": "another"}).status_code == 404
    note("/v1/completions", 404)
    assert post(toka, {}, "/v1/nothing/here").status_code == 404
    note("other", 404)
    assert httpx.get(f"{toka.url}/models/tiny").status_code == 200
    note("/v1/models/{name}", 200, method="GET")

    worker = toka.children()["toka-worker-0"]
    with httpx.stream(
        "POST", f"{toka.url}/v1/completions", json=body("Gone", max_tokens=LONG, n=2, stream=True)
    ) as gone:
        assert gone.status_code == 200
        next(gone.iter_lines())
        os.kill(worker, signal.SIGSTOP)  # else they might end before the client has left
    time.sleep(0.3)
    os.kill(worker, signal.SIGCONT)
    note("/v1/completions", 200)
    wait_for(lambda: toka.gauge("toka_requests_running") == 0, 60)
    sent.prompts.append(4)
    sent.samples.append(2)
    sent.reasons["cancelled"] += 2

    os.kill(worker, signal.SIGSTOP)  # likewise
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{toka.url}/v1/completions", json=body("Left", max_tokens=LONG, n=8), timeout=httpx.Timeout(60, read=0.5)
        )
    wait_for(lambda: scrape(toka.url).value("toka_http_answers_total", status="499") > 0, 60)
    os.kill(worker, signal.SIGCONT)
    note("/v1/completions", 499)
    sent.prompts.append(4)
    sent.samples.append(8)
    sent.reasons["cancelled"] += 8

    streamed_body = body("End", max_tokens=LONG, n=2, stream=True, stream_options={"include_usage": True})
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream("POST", f"{toka.url}/v1/completions", json=streamed_body, timeout=120) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        os.kill(worker, signal.SIGSTOP)  # else they might end before they are aborted
        aborted = pool.submit(post, toka, {"abort_all": True}, "/abort_request")
        time.sleep(1)
        os.kill(worker, signal.SIGCONT)
        assert aborted.result().status_code == 200
        ended = json.loads([line for line in lines if line.startswith("data: {")][-1].removeprefix("data: "))
    note("/v1/completions", 200)
    note("/abort_request", 200)
    assert ended["usage"]["completion_tokens"] < 2 * LONG, "it was aborted"
    sent.lengths.extend(_two_lengths(ended))
    sent.prompts.append(ended["usage"]["prompt_tokens"])
    sent.samples.append(2)
    sent.reasons["abort"] += 2
    return sent


def _two_lengths(answer: dict[str, Any]) -> list[int]:
    total = answer["usage"]["completion_tokens"]
    return [total // 2, total - total // 2]


@pytest.fixture(scope="module")
def sent(toka: TokaProcess) -> Sent:
    return send_load(toka)


@pytest.fixture(scope="module")
def page(toka: TokaProcess, sent: Sent) -> Scrape:  # noqa: ARG001  # after the load
    return scrape(toka.url)


def test_every_sequence_ends_by_one_reason(page: Scrape, sent: Sent) -> None:
    found = {reason: page.value("toka_requests_finished_total", reason=reason) for reason in sent.reasons}
    assert found == sent.reasons
    assert page.value("toka_requests_finished_total") == sum(sent.samples)


def test_histograms_count_the_requests_that_were_sent(page: Scrape, sent: Sent) -> None:
    num_requests, num_finished = len(sent.prompts), len(sent.lengths)
    with_tokens = [length for length in sent.lengths if length > 0]
    counts = {
        "toka_request_n": (num_requests, sum(sent.samples)),
        "toka_request_prompt_tokens": (num_requests, sum(sent.prompts)),
        "toka_completion_tokens": (num_finished, sum(sent.lengths)),
        "toka_queue_seconds": (num_finished, None),
        "toka_prefill_seconds": (num_finished, None),
        "toka_time_to_first_token_seconds": (len(with_tokens), None),
        "toka_decode_seconds": (len(with_tokens), None),
        "toka_time_per_output_token_seconds": (sum(length > 1 for length in sent.lengths), None),
        "toka_request_seconds": (num_requests - 2, None),  # without the two whose clients left
        "toka_request_longest_completion_tokens": (num_requests - 2, None),
    }
    for name, (count, total) in counts.items():
        assert page.value(f"{name}_count") == page.value(f"{name}_bucket", le="+Inf") == count, name
        assert total is None or page.value(f"{name}_sum") == total, name
        buckets = list(page.by_labels(f"{name}_bucket").values())
        assert buckets == sorted(buckets), f"{name}: buckets are cumulative"


def test_buckets_of_lengths_hold_the_lengths(page: Scrape, sent: Sent) -> None:
    for labels, number in page.by_labels("toka_completion_tokens_bucket").items():
        bound = float(dict(labels)["le"])
        assert number == sum(length <= bound for length in sent.lengths), bound


def test_phases_add_up_to_the_time_of_the_request(toka: TokaProcess) -> None:
    before = scrape(toka.url)
    started_s = time.monotonic()
    assert post(toka, body("Alone", max_tokens=40)).status_code == 200
    seconds = time.monotonic() - started_s
    after = scrape(toka.url)

    def grown(name: str) -> float:
        return after.value(f"toka_{name}_seconds_sum") - before.value(f"toka_{name}_seconds_sum")

    phases = [grown(name) for name in ("queue", "prefill", "decode")]
    assert min(phases) > 0
    assert phases[0] + phases[1] == pytest.approx(grown("time_to_first_token"), abs=1e-6)
    assert sum(phases) <= grown("request") <= seconds
    assert grown("time_per_output_token") == pytest.approx(phases[2] / 39, rel=1e-6)


def test_answers_are_counted_by_route_and_status(page: Scrape, sent: Sent) -> None:
    found = {}
    for labels, number in page.by_labels("toka_http_answers_total").items():
        by_name = dict(labels)
        found[by_name["method"], by_name["route"], by_name["status"]] = number
    of_files = [key for key in found if key[1].startswith(("/v1/files", "/v1/batches"))]
    polled = [key for key in found if key[1] in ("/metrics", "/health", "/ready")]
    assert ("GET", "/v1/batches/{batch_id}", "200") in of_files
    assert {key: number for key, number in found.items() if key not in [*of_files, *polled]} == sent.answers


def test_build_info_says_what_runs(page: Scrape) -> None:
    ((labels, value),) = page.by_labels("toka_build_info").items()
    expected = {"version": __version__, "model": "tiny", "dtype": "float32", "device": "cpu", "torch": version("torch")}
    assert value == 1
    assert expected.items() <= dict(labels).items()


def test_cached_blocks_are_evicted_when_their_memory_is_needed(toka: TokaProcess) -> None:
    before = scrape(toka.url)
    prompts = [[number % 250] * 200 for number in range(24)]  # 300 blocks of 256
    assert post(toka, body(prompts, max_tokens=1)).status_code == 200
    after = scrape(toka.url)
    num_evicted = after.value("toka_kv_blocks_evicted_total") - before.value("toka_kv_blocks_evicted_total")
    num_cached = after.value("toka_kv_blocks_cached")
    assert num_evicted > 0
    assert 0 < num_cached <= after.value("toka_kv_blocks")
    # Each prompt leaves its 12 whole blocks in the cache; nothing else runs.
    assert num_cached == before.value("toka_kv_blocks_cached") + 12 * len(prompts) - num_evicted


def test_the_process_is_described_as_in_all_programs(page: Scrape) -> None:
    assert page.value("process_resident_memory_bytes") > 1 << 20
    assert 0 < time.time() - page.value("process_start_time_seconds") < 3600


@pytest.mark.parametrize("title", VLLM_PANELS)
def test_vllms_dashboard_finds_its_series(page: Scrape, title: str) -> None:
    for query in VLLM_PANELS[title]:
        assert list(missing_series(filled(query, "tiny", "15s"), page)) == []


@pytest.mark.parametrize("title", dict(dashboard_queries()))
def test_our_dashboard_finds_its_series(page: Scrape, title: str) -> None:
    for query in (query for of, query in dashboard_queries() if of == title):
        assert list(missing_series(filled(query, "tiny", "15s"), page)) == []


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alert_rules_find_their_series(page: Scrape, rule: dict[str, Any]) -> None:
    assert list(missing_series(compared(rule["expr"]), page)) == []


def test_queries_for_what_is_not_there_are_noticed(page: Scrape) -> None:
    for query in (
        "rate(toka_nothing_total[5m])",
        'toka_requests_finished_total{reason="tired"}',
        "sum by (weather) (toka_requests_running)",
    ):
        assert len(list(missing_series(query, page))) == 1, query
    with pytest.raises(AssertionError, match="guess"):
        list(missing_series("guess(toka_requests_running)", page))


def test_vllms_metrics_equal_ours(page: Scrape, sent: Sent) -> None:
    labels = {"model_name": "tiny", "engine": "0"}
    reasons = {"stop": sent.reasons["stop"], "length": sent.reasons["length"], "error": 0}
    reasons["abort"] = sent.reasons["abort"] + sent.reasons["cancelled"]
    found = {reason: page.value("vllm:request_success_total", finished_reason=reason, **labels) for reason in reasons}
    assert found == reasons
    assert page.value("vllm:request_generation_tokens_sum", **labels) == sum(sent.lengths)
    gaps = sum(length - 1 for length in sent.lengths if length)
    assert page.value("vllm:inter_token_latency_seconds_count", **labels) == gaps
    assert page.value("vllm:generation_tokens_total", **labels) == page.value("toka_generation_tokens_total")
    assert page.value("vllm:request_success_total", **labels) == page.value("vllm:request_success_total")
    cache = {"block_size": "16", "num_gpu_blocks": "256", "kv_cache_size_tokens": "4096", "cache_dtype": "auto"}
    assert page.value("vllm:cache_config_info", **labels, **cache, enable_prefix_caching="True") == 1


# Bounds of vLLM's buckets (vllm/v1/metrics/loggers.py), as recording rules name them.
_LATENCY = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
_FIRST = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
_BETWEEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
VLLM_BOUNDS = {
    "time_to_first_token_seconds": _FIRST,
    "inter_token_latency_seconds": _BETWEEN,
    "e2e_request_latency_seconds": _LATENCY,
    "request_queue_time_seconds": _LATENCY,
    "request_prompt_tokens": "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0 1000.0",
    "request_params_n": "1.0 2.0 5.0 10.0 20.0",
}


@pytest.mark.parametrize("name", VLLM_BOUNDS)
def test_buckets_have_vllms_bounds(page: Scrape, name: str) -> None:
    bounds = {dict(labels)["le"] for labels in page.by_labels(f"vllm:{name}_bucket")}
    assert bounds >= {*VLLM_BOUNDS[name].split(), "+Inf"}


def test_the_dashboard_has_the_form_that_grafana_loads() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert {"title", "uid", "schemaVersion", "version", "time", "templating", "annotations"} <= DASHBOARD.keys()
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query"}
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "heatmap", "stat")
        assert {"defaults", "overrides"} <= panel["fieldConfig"].keys()
        assert panel["targets"], panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_prometheus_has_data_for_every_query(toka: TokaProcess, tmp_path: Path) -> None:
    with running_prometheus(tmp_path, toka.port) as prometheus_url:

        def ask(query: str) -> list[float]:
            answer = httpx.get(f"{prometheus_url}/api/v1/query", params={"query": query}, timeout=60)
            assert answer.status_code == 200, answer.text
            return [float(series["value"][1]) for series in answer.json()["data"]["result"]]

        until_s = time.monotonic() + 20
        while time.monotonic() < until_s:
            for prompts, fields in ((["a"], {"n": 2}), (["b"], {"max_tokens": 12}), (["c"], {"ignore_eos": False})):
                assert post(toka, body(prompts, **fields)).status_code == 200
            time.sleep(0.2)
        queries = [query for _, query in dashboard_queries()]
        queries += [compared(rule["expr"]) for rule in ALERTS]
        queries += [query for panel in VLLM_PANELS.values() for query in panel]
        values = {query: ask(filled(query, "tiny", "15s")) for query in queries}
        assert [query for query, found in values.items() if not found or any(map(math.isnan, found))] == []
        rules = httpx.get(f"{prometheus_url}/api/v1/rules", timeout=60).json()["data"]["groups"][0]["rules"]
        assert {rule["name"]: rule["health"] for rule in rules} == {rule["alert"]: "ok" for rule in ALERTS}
        (throughput,) = ask('sum(rate(vllm:generation_tokens_total{model_name="tiny"}[15s]))')
        assert throughput > 1


@contextmanager
def running_prometheus(directory: Path, target_port: int) -> Iterator[str]:
    """Prometheus, which scrapes the port every half second, with our alert rules -> its URL."""
    job = {"job_name": "toka", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
    every = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
    config = {"global": every, "rule_files": [str(DEPLOY / "alerts.yml")], "scrape_configs": [job]}
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        wait_for(lambda: _status(f"http://{address}/-/ready") == 200, 60)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=30)


LABELS = 'instance="a:1", job="toka", replica="0"'
# What makes each rule fire, and what does not: series, with their values once a minute.
FIRING: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "TokaDown": ({"up": "0x60"}, {"up": "1x60"}),
    "TokaNoReplica": ({"toka_replicas_up": "0x60"}, {"toka_replicas_up": "1x60"}),
    "TokaEngineRestarted": ({"toka_engine_restarts_total": "0x30 1x30"}, {"toka_engine_restarts_total": "3x60"}),
    "TokaServerErrors": (
        {'toka_http_answers_total status="503"': "0+1x60", 'toka_http_answers_total status="200"': "0+50x60"},
        {'toka_http_answers_total status="503"': "0+1x60", 'toka_http_answers_total status="200"': "0+500x60"},
    ),
    "TokaRequestsFail": (
        {
            'toka_requests_finished_total reason="error"': "0+1x60",
            'toka_requests_finished_total reason="stop"': "0+9x60",
        },
        {'toka_requests_finished_total reason="error"': "5x60", 'toka_requests_finished_total reason="stop"': "0+9x60"},
    ),
    "TokaNumericalErrors": ({"toka_nonfinite_rows_total": "0+1x60"}, {"toka_nonfinite_rows_total": "7x60"}),
    **{
        alert: (
            {f'{name}_bucket le="{bound}"': "0+1x60", f'{name}_bucket le="+Inf"': "0+9x60"},
            {f'{name}_bucket le="0.1"': "0+9x60", f'{name}_bucket le="+Inf"': "0+9x60"},
        )
        for alert, name, bound in (
            ("TokaSlowFirstTokens", "toka_time_to_first_token_seconds", "20"),
            ("TokaSlowTokens", "toka_time_per_output_token_seconds", "0.75"),
            ("TokaLongQueue", "toka_queue_seconds", "960"),
        )
    },
    "TokaPreempts": (
        {"toka_recomputed_tokens_total": "0+100x60", "toka_generation_tokens_total": "0+1000x60"},
        {"toka_recomputed_tokens_total": "0+10x60", "toka_generation_tokens_total": "0+1000x60"},
    ),
    "TokaManagerLimits": ({"toka_manager_busy_fraction": "0.95x60"}, {"toka_manager_busy_fraction": "0.5x60"}),
    "TokaDeviceIdle": ({"toka_device_idle_seconds_total": "0+12x60"}, {"toka_device_idle_seconds_total": "0+1x60"}),
    "TokaRecompiles": ({"toka_recompiles_total": "0x30 1x30"}, {"toka_recompiles_total": "2x60"}),
    "TokaServerBlocked": ({"toka_event_loop_stalls_total": "0+2x60"}, {"toka_event_loop_stalls_total": "0+1x60"}),
    "TokaBatchesNotStored": ({"toka_batch_storage_failing": "1x60"}, {"toka_batch_storage_failing": "0x60"}),
    "TokaFilesRunOut": (
        {"process_open_fds": "950x60", "process_max_fds": "1000x60"},
        {"process_open_fds": "90x60", "process_max_fds": "1000x60"},
    ),
    "TokaLogDropped": ({"toka_log_records_dropped_total": "0+1x60"}, {"toka_log_records_dropped_total": "4x60"}),
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    assert FIRING.keys() == {rule["alert"] for rule in ALERTS}
    groups = []
    for rule in ALERTS:
        for is_firing, series in zip((True, False), FIRING[rule["alert"]], strict=True):
            inputs = []
            for described, values in series.items():
                name, _, label = described.partition(" ")
                inputs.append({"series": f"{name}{{{LABELS}{', ' + label if label else ''}}}", "values": values})
            found = f'count(ALERTS{{alertname="{rule["alert"]}", alertstate="firing"}})'
            samples = [{"labels": "{}", "value": 1}] if is_firing else []
            test = {"expr": found, "eval_time": "40m", "exp_samples": samples}
            groups.append({"interval": "1m", "input_series": inputs, "promql_expr_test": [test]})
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yml")], "tests": groups}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
