"""Whole steps of every kind, while whatever would make the host wait for the device is refused.

Not yet run on a GPU, where torch refuses it; on the CPU, the pretended device does.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from tests.helpers.tiny_model import VOCAB_SIZE
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.steps import StepDriver
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.model.execution.runner import ModelRunner, StepResult
from tokasaurus.model.worker.warmup import ForwardLimits, decode_after, small_forwards, widest_prefill

PAGE_SIZE = 16
LIMITS = ForwardLimits(max_tokens=256, max_seqs=20, context_length=256, vocab_size=VOCAB_SIZE)


@dataclass(frozen=True)
class GuardedRunner:
    """Runs steps inside `refusing`; their results are read outside of it."""

    runner: ModelRunner
    refusing: Callable[[], AbstractContextManager[object]]

    def run(self, step: ForwardInput) -> StepResult | None:
        with self.refusing():
            return self.runner.run(step)


def check_no_step_waits(
    make_runner: Callable[[], ModelRunner], refusing: Callable[[], AbstractContextManager[object]]
) -> None:
    """make_runner: a runner with at least 20 slots and 200 blocks. The same steps run before on another runner, without
    `refusing`: the first use of a kernel may compile or load it."""
    expected = run_every_kind(GuardedRunner(make_runner(), nullcontext))
    found = run_every_kind(GuardedRunner(make_runner(), refusing))
    assert found.keys() == expected.keys()
    assert all(len(found[slot]) == len(pairs) for slot, pairs in expected.items())


def run_every_kind(runner: GuardedRunner) -> dict[int, list[tuple[int, float | None]]]:
    """Prompts and decode rows with every option and every output; the largest steps; prefix groups that change with
    each step, beside chunks of prompts; decode steps alone. -> what the last two have sampled."""
    widest = widest_prefill(LIMITS)
    for step in (*small_forwards(LIMITS, PAGE_SIZE), widest, decode_after(widest)):
        result = runner.run(step)
        assert result is not None
        assert np.isin(result.output().token_ids, np.arange(VOCAB_SIZE)).all()
        assert result.output().nonfinite is None
    samples = Samples(StepDriver(runner, PAGE_SIZE), PAGE_SIZE, seed=3)
    samples.run(8, grouped=True)
    samples.run(12, grouped=False)
    assert samples.num_grouped > 15
    return samples.sampled
