"""Traces of requests, as a collector of OpenTelemetry receives them from a real server."""

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

import itertools

from tests.end_to_end.helpers.batch_client import FINAL_STATUSES, BatchClient
from tests.end_to_end.helpers.otlp_collector import Collector, ReceivedSpan, running_collector
from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka
from tests.helpers.tiny_model import save_tiny_model
from tokasaurus import __version__
from tokasaurus.monitoring.request_spans import CLOSE_SECONDS, MAX_SEQUENCES

FLAGS = ("dtype=float32", "kv_cache_num_tokens=4096", "max_tokens_per_forward=64", "max_seqs_per_forward=8")
SERVER, INTERNAL = 2, 1
CLOCKS_NS = 2_000_000
SECRET = "marmalade"
"""In every prompt, and in no span."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def toka(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokaProcess]:
    with traced_toka(collector, tmp_path_factory.mktemp("model")) as toka:
        yield toka


@contextmanager
def traced_toka(collector: Collector, directory: Path) -> Iterator[TokaProcess]:
    """A server that sends its spans to `collector`."""
    save_tiny_model(directory, "llama")
    own = (f"model={directory}", f"data_dir={directory / 'data'}", "served_model_name=tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds between two deliveries
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        with running_toka(*own, *FLAGS, f"otel_endpoint={collector.url}") as toka:
            yield toka


def context(is_sampled: bool = True) -> tuple[dict[str, str], str, str]:
    """Headers of a client with a trace of its own, the id of that trace, and of the client's span."""
    trace_id, span_id = f"{random.getrandbits(128) | 1:032x}", f"{random.getrandbits(64) | 1:016x}"
    return {"traceparent": f"00-{trace_id}-{span_id}-0{is_sampled:d}"}, trace_id, span_id


def body(**fields: Any) -> dict[str, Any]:
    prompt = {"prompt": f"{SECRET} and toast", "max_tokens": 5, "ignore_eos": True, "temperature": 0.5}
    return {"model": "default", **prompt, **fields}


def post(toka: TokaProcess, headers: dict[str, str], fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{toka.url}/v1/completions", json=fields, headers=headers, timeout=120)


def below(spans: list[ReceivedSpan], parent: ReceivedSpan) -> list[ReceivedSpan]:
    return [span for span in spans if span.parent_id == parent.span_id]


def test_a_request_is_a_child_of_the_clients_span_and_has_its_phases(toka: TokaProcess, collector: Collector) -> None:
    headers, trace_id, span_id = context()
    began_ns = time.time_ns()
    usage = post(toka, headers, body()).json()["usage"]
    ended_ns = time.time_ns()
    root, *phases = collector.spans_of(trace_id, 4)
    assert (root.name, root.kind, root.parent_id) == ("POST /v1/completions", SERVER, span_id)
    assert [(span.name, span.kind) for span in phases] == [(name, INTERNAL) for name in ("queue", "prefill", "decode")]
    assert below(phases, root) == phases
    times = [began_ns, root.start_ns, phases[0].start_ns]
    for before, after in itertools.pairwise(phases):
        assert before.end_ns == pytest.approx(after.start_ns, abs=1000)
    times += [phases[0].end_ns, phases[1].end_ns, phases[2].end_ns, root.end_ns, ended_ns]
    # Of two processes, each of which adds its own reading of the time of day to its clock
    assert all(after >= before - CLOCKS_NS for before, after in itertools.pairwise(times))
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.provider.name": "tokasaurus",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "toka.prompts": 1,
        "toka.sequences": 1,
    }
    assert phases[1].attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert phases[2].attributes["gen_ai.usage.output_tokens"] == 5
    assert root.resource["service.name"] == "tokasaurus"
    assert root.resource["service.version"] == __version__
    assert root.resource["deployment.environment.name"] == "test"
    assert set(collector.paths) == {"/v1/traces"}


def test_a_request_without_a_context_begins_a_trace(toka: TokaProcess, collector: Collector) -> None:
    known = {span.trace_id for span in collector.spans()}
    fields = {"messages": [{"role": "user", "content": SECRET}], "model": "default", "max_tokens": 2}
    assert httpx.post(f"{toka.url}/chat/completions", json=fields, timeout=120).status_code == 200
    deadline_s = time.monotonic() + 30
    while not (new := {span.trace_id for span in collector.spans()} - known):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    root, *_ = collector.spans_of(new.pop(), 4)
    assert (root.name, root.parent_id) == ("POST /v1/chat/completions", "")
    assert root.attributes["gen_ai.operation.name"] == "chat"


def test_a_stream_of_many_samples_shows_the_first_ones(toka: TokaProcess, collector: Collector) -> None:
    headers, trace_id, _ = context()
    num_samples = MAX_SEQUENCES + 4
    assert post(toka, headers, body(n=num_samples, stream=True)).status_code == 200
    spans = collector.spans_of(trace_id, 1 + 3 * MAX_SEQUENCES)
    root = next(span for span in spans if span.kind == SERVER)
    assert root.attributes["gen_ai.usage.output_tokens"] == 5 * num_samples
    assert root.attributes["toka.sequences"] == num_samples
    for name in ("queue", "prefill", "decode"):
        samples = [span.attributes["toka.sample"] for span in below(spans, root) if span.name == name]
        assert len(set(samples)) == len(samples) == MAX_SEQUENCES


def test_a_refused_request_has_no_phases(toka: TokaProcess, collector: Collector) -> None:
    headers, trace_id, span_id = context()
    assert post(toka, headers, body(n=0)).status_code == 400
    (root,) = collector.spans_of(trace_id, 1)
    expected = {"http.request.method": "POST", "http.route": "/v1/completions", "http.response.status_code": 400}
    assert (root.parent_id, root.attributes) == (span_id, expected)


def test_a_bulk_request_is_one_span_and_a_batch_has_none_of_its_lines(toka: TokaProcess, collector: Collector) -> None:
    headers, trace_id, _ = context()
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body(max_tokens=1 + number)}
        for number in range(3)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    assert httpx.post(f"{toka.url}/v1/bulk", content=content, headers=headers, timeout=120).status_code == 200
    spans = collector.spans_of(trace_id, 10)
    assert [span.name for span in spans if span.kind == SERVER] == ["POST /v1/bulk"]
    assert spans[0].attributes["gen_ai.usage.output_tokens"] == 1 + 2 + 3
    assert "gen_ai.request.max_tokens" not in spans[0].attributes, "each line has its own"
    batches = BatchClient(toka.url)
    batch = batches.wait(batches.create("/v1/completions", batches.upload(content))["id"], FINAL_STATUSES, 120)
    assert batch["request_counts"]["completed"] == 3
    headers, trace_id, _ = context()
    assert post(toka, headers, body()).status_code == 200
    collector.spans_of(trace_id, 4)  # whatever the batch had sent would have come before
    created = [span for span in collector.spans() if span.name == "POST /v1/batches"]
    assert len(created) == 1
    assert below(collector.spans(), created[0]) == []


def test_a_trace_that_the_client_does_not_sample_is_left_out(toka: TokaProcess, collector: Collector) -> None:
    headers, trace_id, _ = context(is_sampled=False)
    assert post(toka, headers, body()).status_code == 200
    headers, later_id, _ = context()
    assert post(toka, headers, body()).status_code == 200
    collector.spans_of(later_id, 4)
    assert [span for span in collector.spans() if span.trace_id == trace_id] == []


def test_no_span_has_text_of_a_client(toka: TokaProcess, collector: Collector) -> None:
    headers, trace_id, _ = context()
    assert post(toka, headers, body()).status_code == 200
    assert collector.spans_of(trace_id, 4)
    assert not any(SECRET.encode() in content for content in collector.bodies)


@pytest.mark.long
def test_a_collector_that_hangs_delays_neither_requests_nor_the_end(tmp_path: Path) -> None:
    """Of its own, for other tests may come later."""
    with running_collector() as collector, traced_toka(collector, tmp_path) as toka:
        headers, trace_id, _ = context()

        def seconds_of_requests() -> float:
            began_s = time.monotonic()
            for _ in range(20):
                assert post(toka, headers, body()).status_code == 200
            return time.monotonic() - began_s

        before_s = seconds_of_requests()
        assert collector.spans_of(trace_id, 20 * 4)
        collector.answers.clear()
        assert seconds_of_requests() < 3 * before_s + 1
        began_s = time.monotonic()
        assert toka.stop() == 0
        assert time.monotonic() - began_s < CLOSE_SECONDS + 15
