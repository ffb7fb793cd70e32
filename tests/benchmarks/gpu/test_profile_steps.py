"""What is counted in a profile: traces as torch writes them for a GPU, with known numbers, and one of this machine."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.profile_steps import measure, summarize
from benchmarks.random_models import TINY, write_model
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.entry import start_worker

NUM_LAYERS, NUM_STEPS = 3, 2


def event(category: str, name: str, began_us: float, us: float, thread: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, "ts": began_us, "dur": us}


def gpu_trace() -> list[dict[str, Any]]:
    """Two steps of three layers: each has a copy, two gemms and a norm a layer, and one draw."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {}}]
    events.append(event("gpu_user_annotation", "## Call CompiledFxGraph", 0, 1000))
    events.append(event("cpu_op", "aten::mm", 0, 1000))
    for step in range(NUM_STEPS):
        now = 1000.0 * step
        events.append(event("gpu_memcpy", "Memcpy HtoD", now, 10))
        events.append(event("cuda_runtime", "cudaMemcpyAsync", now, 3))
        events.append(event("cuda_runtime", "cudaGraphLaunch", now, 3))
        events.append(event("cuda_runtime", "cudaEventRecord", now, 3))
        events.append(event("cuda_driver", "cuLaunchKernelEx", now, 3))
        now += 30  # a gap of 20
        for _ in range(NUM_LAYERS):
            events += [event("kernel", "gemm", now, 40), event("kernel", "gemm", now + 40, 40)]
            events.append(event("kernel", "norm", now + 75, 10))  # begins before the gemm ends
            now += 90  # a gap of 5
        events.append(event("kernel", "draw", now, 50))
    return events


def test_kernels_launches_and_gaps_of_a_gpu_are_those_of_the_trace() -> None:
    found = summarize(gpu_trace(), NUM_STEPS, NUM_LAYERS)
    assert found["is_on_device"]
    assert found["kernels_per_step"] == 11
    assert found["kernels_per_layer"] == 3
    assert found["launches_per_step"] == {"cuLaunchKernelEx": 1, "cudaGraphLaunch": 1, "cudaMemcpyAsync": 1}
    busy_us = 10 + 3 * 85 + 50
    assert found["busy_ms"] == pytest.approx(busy_us / 1000)
    window_us = 1000 + 30 + 3 * 90 + 50
    assert found["idle_ms"] == pytest.approx((window_us - 2 * busy_us) / 1000 / NUM_STEPS)
    gemm, draw, norm, copy = found["longest_kernels"]
    assert gemm == {"name": "gemm", "per_step": 6, "us": 240, "share": pytest.approx(240 / 330)}
    assert [kernel["name"] for kernel in (draw, norm, copy)] == ["draw", "norm", "Memcpy HtoD"]
    between, first, *_ = found["longest_gaps"]
    assert between == {"us": 1000 - 350, "after": "draw", "before": "Memcpy HtoD"}
    assert first == {"us": 20, "after": "Memcpy HtoD", "before": "gemm"}


def test_without_a_device_the_innermost_operations_are_counted() -> None:
    events = [
        *(event("cpu_op", "outer", 0, 100), event("cpu_op", "inner", 10, 20), event("cpu_op", "inner", 40, 20)),
        *(event("cpu_op", "alone", 200, 30), event("cpu_op", "other thread", 50, 100, thread=8)),
    ]
    found = summarize(events, 1, 1)
    assert not found["is_on_device"]
    names = {kernel["name"]: kernel["per_step"] for kernel in found["longest_kernels"]}
    assert names == {"inner": 2, "alone": 1, "other thread": 1}


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernels"):
        summarize([event("python_function", "run", 0, 1)], 1, 1)


def test_each_layer_of_plain_torch_has_its_operations(tmp_path: Path) -> None:
    write_model(tmp_path, TINY)
    flags = ["device=cpu", "cpu_isa=torch", "kv_cache_num_tokens=1024", "max_seqs_per_forward=4"]
    config = ServerConfig.parse([f"model={tmp_path}", "max_tokens_per_forward=32", *flags])
    worker = start_worker(config, resolve_checkpoint(str(tmp_path)), Mesh(), 0, lambda _: None)
    sizes = worker.limits.num_kv_blocks, worker.limits.page_size
    path = tmp_path / "trace.json.gz"
    found = measure(worker.runner, 2, 40, *sizes, TINY.num_layers, path, num_prompt=20)
    assert found["with_prompt"]["num_tokens"] == 20
    assert found["with_groups"]["num_tokens"] == 32
    assert 0 < found["with_prompt"]["host_ms"] <= found["with_prompt"]["step_ms"] * 1.5
    assert found["kernels_per_layer"] >= 25
    assert found["kernels_per_layer"] * TINY.num_layers <= found["kernels_per_step"]
    assert path.stat().st_size > 0
