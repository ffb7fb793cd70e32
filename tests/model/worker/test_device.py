"""The device, dtypes and threads of a worker by flag, device and processor; and the stopwatch of a CPU."""

import math
import os
import subprocess
import sys
import time

import pytest
import torch

from tests.helpers.examples import few
from tests.model.helpers.steps import CPU
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import FlagRefused, UserError
from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.cpu.layer_executor import LayerKernels
from tokasaurus.model.decoder.layers import Linear
from tokasaurus.model.worker import device as device_module
from tokasaurus.model.worker.device import (
    choose_activation_dtype,
    choose_device,
    choose_dtype,
    choose_kv_cache_dtype,
    leave_threads_to,
    make_stopwatch,
    set_worker_threads,
    worker_threads,
)
from tokasaurus.monitoring import cores
from tokasaurus.monitoring.cuda_devices import CudaDevices
from tokasaurus.monitoring.memory_nodes import MemoryNode, Place

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def pretend_cuda_devices(count: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """-> the devices that become the current one, as they do."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize("name", ["cuda", None])
def test_each_worker_has_a_cuda_device_of_its_own_as_the_current_one(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = pretend_cuda_devices(3, monkeypatch)
    expected = [torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cuda:2")]
    assert [choose_device(name, index) for index in range(3)] == expected
    assert current == expected


def test_a_worker_without_a_cuda_device_of_its_own_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    current = pretend_cuda_devices(2, monkeypatch)
    with pytest.raises(UserError, match="worker 3 has no device of its own; torch sees only 2"):
        choose_device("cuda", 2)
    assert current == []


def test_a_driver_that_fails_is_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda_devices(0, monkeypatch)
    monkeypatch.setattr(device_module, "cuda_devices", lambda: CudaDevices(2, 1 << 30))
    monkeypatch.setattr(device_module, "describe_driver", lambda: "driver 550.54, for CUDA up to 12.4")

    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nPlease update it")

    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(FlagRefused) as refused:
        choose_device(None, 0)
    line = str(refused.value)
    assert line.startswith("this machine has 2 NVIDIA devices (driver 550.54, for CUDA up to 12.4), but torch ")
    assert "too old (found version 12040)." in line
    assert line.endswith("; device=cpu serves on the CPU")
    assert refused.value.exit_code == 2
    assert "\n" not in line
    assert choose_device("cpu", 0) == CPU
    for unseen in (None, CudaDevices(0, 0), CudaDevices(0, 0, num_unused=2)):  # hidden, or torch is a build for CPUs
        monkeypatch.setattr(device_module, "cuda_devices", lambda unseen=unseen: unseen)
        assert choose_device(None, 0) == CPU


@pytest.mark.parametrize(("name", "num_devices"), [("cpu", 2), (None, 0)])
def test_workers_share_the_cpu(name: str | None, num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    current = pretend_cuda_devices(num_devices, monkeypatch)
    assert [choose_device(name, index) for index in (0, 5)] == [CPU, CPU]
    assert current == []


def kernels_with(has_bfloat16_arithmetic: bool, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = load_kernels()
    assert kernels is not None
    monkeypatch.setattr(kernels, "has_bfloat16_arithmetic", has_bfloat16_arithmetic)
    return kernels


def chosen(
    dtype: str | None, kv_cache_dtype: str | None, kernels: Kernels | None, is_compiled: bool = False
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """-> dtypes of weights, activations and KV cache."""
    weights = choose_dtype(dtype, CPU, kernels, is_compiled)
    activations = choose_activation_dtype(weights, kernels, is_compiled)
    return weights, activations, choose_kv_cache_dtype(kv_cache_dtype, weights, activations)


def test_kernels_that_multiply_bfloat16_use_it_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_with(True, monkeypatch)
    assert chosen(None, None, kernels) == (BFLOAT16, BFLOAT16, BFLOAT16)
    assert chosen("float32", None, kernels) == (FLOAT32, FLOAT32, FLOAT32)
    assert chosen(None, "float32", kernels) == (BFLOAT16, BFLOAT16, FLOAT32)


def test_other_kernels_widen_bfloat16_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_with(False, monkeypatch)
    assert chosen(None, None, kernels) == (BFLOAT16, FLOAT32, FLOAT16)
    assert chosen("float32", None, kernels) == (FLOAT32, FLOAT32, FLOAT32)
    assert chosen(None, "bfloat16", kernels) == (BFLOAT16, FLOAT32, BFLOAT16)


def test_compiled_layers_compute_in_the_dtype_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_with(False, monkeypatch)
    assert chosen(None, None, kernels, is_compiled=True) == (FLOAT32, FLOAT32, FLOAT32)
    assert chosen("bfloat16", None, kernels, is_compiled=True) == (BFLOAT16, BFLOAT16, BFLOAT16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plain_torch_uses_the_requested_dtype(dtype: str) -> None:
    assert chosen(dtype, None, None) == (getattr(torch, dtype),) * 3


@pytest.mark.parametrize(
    ("num_cores", "max_threads", "num_workers", "expected"),
    [
        (1, 1, 1, 1),
        (2, 2, 1, 2),
        (3, 3, 1, 3),
        (4, 4, 1, 3),  # one for server and manager
        (64, 64, 1, 63),
        (64, 32, 1, 32),  # hyper-threads
        (16, 16, 4, 3),
        (2, 2, 4, 1),
    ],
)
def test_threads_of_a_worker(num_cores: int, max_threads: int, num_workers: int, expected: int) -> None:
    assert worker_threads(num_cores, max_threads, num_workers) == expected


@pytest.mark.parametrize(
    ("words", "num_cores", "num_sharing", "quota", "expected"),
    [
        ("dp_size=2", 32, 1, math.inf, 31),  # one for server and manager on each node
        ("dp_size=4", 32, 2, math.inf, 15),
        ("dp_size=2 tp_size=2", 32, 1, math.inf, 15),
        ("dp_size=2", 32, 1, 20, 9),  # half of the quota
        ("dp_size=3", 32, 2, 24, 7),  # two thirds, for two
        ("dp_size=2", 32, 1, 1, 1),
    ],
)
def test_threads_of_a_replica_are_for_the_cores_of_its_nodes(
    words: str, num_cores: int, num_sharing: int, quota: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system has not allowed to bind the process, so that it may run on all 128 cores."""
    threads = [64]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)), raising=False)
    monkeypatch.setattr(cores, "cgroup_cores", lambda: quota)
    place = Place((MemoryNode(1, frozenset(range(32, 32 + num_cores)), 1 << 36),), num_sharing)
    assert set_worker_threads(ServerConfig.parse(words.split()), place) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone pins processes to cores")
@few(1, ("environment", "expected"), [({}, 1), ({"OMP_NUM_THREADS": "2"}, min(2, os.cpu_count() or 1))])
def test_a_process_pinned_to_one_core_has_one_thread_or_omp_num_threads(
    environment: dict[str, str], expected: int
) -> None:
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from tokasaurus.config import ServerConfig; "
        "from tokasaurus.model.worker.device import set_worker_threads; print(set_worker_threads(ServerConfig()))"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run(
        [sys.executable, "-c", script], env={**inherited, **environment}, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(expected)


def test_torch_has_one_thread_while_the_kernels_have_its_threads() -> None:
    kernels = load_kernels()
    assert kernels is not None
    before = torch.get_num_threads()
    linear = Linear(64, 256, bias=False, dtype=torch.float32)
    torch.nn.init.normal_(linear.weight)
    weight = linear.weight.clone()
    linear.pack(LayerKernels(kernels))
    torch.set_num_threads(3)  # so that some of the kernels' threads are new
    try:
        with leave_threads_to(kernels):
            assert torch.get_num_threads() == 1
            for num_rows in (1, 200, 70):
                x = torch.randn(num_rows, 64)
                torch.testing.assert_close(linear(x), x @ weight.T, atol=1e-4, rtol=1e-4)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_on_a_cpu_the_time_until_the_call_returns_is_measured() -> None:
    def work() -> None:
        end_s = time.perf_counter() + 0.03
        while time.perf_counter() < end_s:
            pass

    start_s = time.perf_counter()
    seconds = make_stopwatch(CPU).seconds(work)
    assert 0.03 <= seconds <= time.perf_counter() - start_s
