"""The benchmark of a fast worker: the device keeps its time, idle time is counted, and a missed limit is reported."""

import json

import numpy as np
import pytest

from benchmarks.manager import fast_worker
from benchmarks.manager.fast_worker import COUNTERS, MAX_NEW_TOKENS, Device, DeviceSpeed, StreamedLoad
from benchmarks.manager.measures import MEASURES
from tokasaurus.messages.forward import ForwardInput, SlotChanges

SPEED = DeviceSpeed(0.002, 1e-5)


def make_step(step_id: int, num_decode: int, num_prefill_tokens: int) -> ForwardInput:
    slots = np.arange(1, num_decode + 2 if num_prefill_tokens else num_decode + 1, dtype=np.int32)
    empty = np.empty(0, np.int32)
    return ForwardInput(
        step_id,
        slots,
        np.array([1] * num_decode + [num_prefill_tokens] * (num_prefill_tokens > 0), np.int32),
        num_decode,
        np.zeros(num_prefill_tokens, np.int32),
        SlotChanges(empty, None, empty, empty),
    )


def test_the_device_computes_one_step_after_the_other_and_counts_the_time_between() -> None:
    counters = [0.0] * len(COUNTERS)
    device = Device(SPEED, 8, counters)
    device.queue(make_step(0, 3, 0), 10.0)  # until 10.002
    device.queue(make_step(1, 3, 1000), 10.001)  # until 10.014
    assert device.finished(10.0019) is None
    first = device.finished(10.0021)
    assert (first.step_id, len(first.token_ids), first.forward_seconds) == (0, 3, 0.002)
    assert device.finished(10.0139) is None
    second = device.finished(10.0141)
    assert (second.step_id, second.forward_seconds) == (1, pytest.approx(0.012))
    device.queue(make_step(2, 2, 0), 10.019)  # 5 ms late, until 10.021
    found = dict(zip(COUNTERS, counters, strict=True))
    assert found["idle_s"] == pytest.approx(0.005)
    assert found["busy_s"] == pytest.approx(0.016)
    assert (found["num_steps"], found["num_gaps"], found["num_decode_rows"]) == (3, 1, 8)
    assert (found["num_prefill_tokens"], found["queued"]) == (1000, 1)
    assert device.finished(10.0211).step_id == 2
    assert device.finished(20.0) is None


def test_a_quarter_of_the_load_is_streamed_and_every_request_fits_the_server() -> None:
    load = StreamedLoad(0.25)
    requests = [load.next() for _ in range(2000)]
    assert 0.2 < np.mean([request.is_streamed for request in requests]) < 0.3
    lengths = np.array([len(request.prompt_ids) for request in requests])
    assert 0.005 < (lengths > 4000).mean() < 0.03
    assert (lengths + MAX_NEW_TOKENS).max() <= 8192


def test_each_measure_is_turned_off_alone_and_all_together() -> None:
    found = fast_worker.variants(list(MEASURES))
    assert next(iter(found)) == "all on"
    assert list(found.values()) == [(), *((name,) for name in MEASURES), tuple(MEASURES)]


@pytest.mark.long
def test_a_short_run_writes_all_figures_and_checks_the_limit(tmp_path, monkeypatch) -> None:
    path = tmp_path / "found.json"
    short = [
        "--sequences",
        "32",
        "--off",
        "coalesces_streams",
        "--warm-seconds",
        "0.2",
        "--windows",
        "2",
        "--window-seconds",
        "0.3",
    ]
    monkeypatch.setattr(fast_worker, "CHECKED_SEQUENCES", 32)
    monkeypatch.setattr(fast_worker, "MAX_IDLE_SHARE", 10.0)  # a busy machine stops the manager
    assert fast_worker.main([*short, "--check", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [run["name"] for run in found["runs"]] == ["all on", "coalesces_streams off", "all off"]
    for run in found["runs"]:
        assert len(run["windows"]) == 2
        medians = run["medians"]
        assert 0 <= medians["idle_share"] < 1
        assert medians["mean_step_ms"] >= 2
        assert 16 < medians["rows_per_step"] <= 32
        busy_share = medians["steps_per_s"] * medians["mean_step_ms"] / 1e3
        assert busy_share + medians["idle_share"] == pytest.approx(1, abs=0.5), medians
    monkeypatch.setattr(fast_worker, "MAX_IDLE_SHARE", -1.0)
    monkeypatch.setattr(fast_worker, "variants", lambda _: {"all on": ()})
    assert fast_worker.main([*short, "--check"]) == 1
