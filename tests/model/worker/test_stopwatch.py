"""The stopwatch of a CPU; tests/gpu has the one of CUDA."""

import time

from tests.model.helpers.steps import CPU
from tokasaurus.model.worker.stopwatch import make_stopwatch


def test_on_a_cpu_the_time_until_the_call_returns_is_measured() -> None:
    def work() -> None:
        end_s = time.perf_counter() + 0.03
        while time.perf_counter() < end_s:
            pass

    start_s = time.perf_counter()
    seconds = make_stopwatch(CPU).seconds(work)
    assert 0.03 <= seconds <= time.perf_counter() - start_s
