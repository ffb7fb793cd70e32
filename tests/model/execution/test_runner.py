"""Slots that are closed and opened between steps, and steps that sample nothing."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import oracle_greedy
from tests.model.helpers.steps import NOTHING, int32, load_runner
from tokasaurus.messages.forward import ForwardInput, SlotChanges, SlotOpens
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.model.execution.runner import ModelRunner, StepResult


class OneSlot:
    """Runs slot 1 alone, with messages that the test writes out."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def prefill(
        self,
        tokens: list[int],
        blocks: list[int],
        opens: tuple[int, int] | None = None,
        closes: bool = False,
        temperature: float = 0.0,
    ) -> StepResult:
        """opens: (prompt tokens, first position): the message opens the slot. closes: it closes the slot first."""
        opened = None if opens is None else open_slot(*opens, temperature)
        changes = SlotChanges(int32([1] if closes else []), opened, int32([1] * len(blocks)), int32(blocks))
        return self._runner.run(ForwardInput(1, int32([1]), int32([len(tokens)]), 0, int32(tokens), changes))

    def decode(self, num_tokens: int) -> list[int]:
        step = ForwardInput(1, int32([1]), int32([1]), 1, NOTHING, SlotChanges(NOTHING, None, NOTHING, NOTHING))
        return [int(self._runner.run(step).output().token_ids[0]) for _ in range(num_tokens)]


def open_slot(num_prompt_tokens: int, first_position: int, temperature: float) -> SlotOpens:
    return SlotOpens(
        slots=int32([1]),
        num_prompt_tokens=int32([num_prompt_tokens]),
        first_positions=int32([first_position]),
        sampling=np.array([SamplingParams(temperature)], SAMPLING_DTYPE),
        seeds=np.array([3], np.uint64),
        sample_indices=np.zeros(1, np.uint32),
        want_logprobs=np.ones(1, np.bool_),
    )


def random_prompt() -> list[int]:
    rng = random.Random(1)
    return [rng.randrange(VOCAB_SIZE) for _ in range(40)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_preempted_sequence_continues_with_the_same_tokens(temperature: float, tmp_path: Path) -> None:
    """One message closes and opens its slot; its first two blocks are still cached, and its prompt now ends with four
    tokens that it sampled before."""
    oracle = save_tiny_model(tmp_path, "llama")
    slot = OneSlot(load_runner(tmp_path, torch.float32))
    prompt = random_prompt()
    first = slot.prefill(prompt, [7, 3, 9], opens=(40, 0), temperature=temperature)
    tokens = [*first.output().token_ids.tolist(), *slot.decode(6)]
    if temperature == 0:
        assert tokens == oracle_greedy(oracle, prompt, 7)[0]
    else:
        assert len(set(tokens)) > 1

    longer = prompt + tokens[:4]
    fifth = slot.prefill(longer[32:], [7, 3, 11], opens=(44, 32), closes=True, temperature=temperature)
    assert [*fifth.output().token_ids.tolist(), *slot.decode(2)] == tokens[4:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_that_completes_no_prompt_samples_nothing(dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    prompt = random_prompt()
    slot = OneSlot(load_runner(tmp_path, dtype))
    first = slot.prefill(prompt[:20], [7, 3], opens=(40, 0))
    assert first.output().token_ids.tolist() == []
    assert first.output().logprobs is None
    second = slot.prefill(prompt[20:], [9])
    whole = OneSlot(load_runner(tmp_path, dtype)).prefill(prompt, [1, 2, 3], opens=(40, 0))
    assert second.output().token_ids.tolist() == whole.output().token_ids.tolist()
