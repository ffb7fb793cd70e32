"""Number of threads of a worker, by the cores that it may use."""

import os
import subprocess
import sys

import pytest
import torch

from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.cpu.layer_executor import LayerKernels
from tokasaurus.model.decoder.layers.linear import Linear
from tokasaurus.model.worker.threads import leave_threads_to, worker_threads


@pytest.mark.parametrize(
    ("num_cores", "most", "num_workers", "expected"),
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
def test_threads_of_a_worker(num_cores: int, most: int, num_workers: int, expected: int) -> None:
    assert worker_threads(num_cores, most, num_workers) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone pins processes to cores")
@pytest.mark.parametrize(
    ("environment", "expected"), [({}, 1), ({"OMP_NUM_THREADS": "2"}, min(2, os.cpu_count() or 1))]
)
def test_a_process_pinned_to_one_core_has_one_thread_or_omp_num_threads(
    environment: dict[str, str], expected: int
) -> None:
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from tokasaurus.model.worker.threads import set_worker_threads; print(set_worker_threads(1))"
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
