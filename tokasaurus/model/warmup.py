"""The largest forward, run at start-up: if it fits, every later one does."""

import numpy as np

from tokasaurus.messages.forward import ForwardInput
from tokasaurus.messages.slots import SlotChanges, SlotOpens
from tokasaurus.model.runner import ModelRunner

_NUM_TOP_P_ROWS = 64


def largest_step(max_tokens: int, max_seqs: int, max_tokens_per_sequence: int) -> ForwardInput:
    """A step with as many tokens and as many sampling rows as a forward may have.

    Its slots own no blocks: all keys and values go to the padding block. The first row is greedy. Sampling works
    through rows in chunks, so that top-p, which is slow on the flat logits of a made-up prompt, is on in some alone.
    """
    num_rows = min(max_seqs, max_tokens)
    shares = np.full(num_rows, max_tokens // num_rows, np.int32)
    shares[: max_tokens % num_rows] += 1
    shares = np.minimum(shares, max_tokens_per_sequence)
    slots = np.arange(1, num_rows + 1, dtype=np.int32)
    opened = SlotOpens(
        slots=slots,
        num_prompt_tokens=shares,
        first_positions=np.zeros(num_rows, np.int32),
        temperatures=np.minimum(np.arange(num_rows), 1).astype(np.float32),
        top_ps=np.where(np.arange(num_rows) < _NUM_TOP_P_ROWS, 0.9, 1.0).astype(np.float32),
        seeds=np.arange(num_rows, dtype=np.uint64),
        sample_indices=np.zeros(num_rows, np.uint32),
        want_logprobs=np.ones(num_rows, np.bool_),
    )
    nothing = np.zeros(0, np.int32)
    return ForwardInput(
        step_id=0,
        slots=slots,
        num_tokens=shares,
        num_decode=0,
        prompt_ids=np.zeros(int(shares.sum()), np.int32),
        changes=SlotChanges(closed=nothing, opened=opened, block_slots=nothing, block_ids=nothing),
    )


def decode_step(max_seqs: int) -> ForwardInput:
    """A step in which every slot decodes; follows `largest_step`, which opened them."""
    slots = np.arange(1, max_seqs + 1, dtype=np.int32)
    nothing = np.zeros(0, np.int32)
    return ForwardInput(
        step_id=0,
        slots=slots,
        num_tokens=np.ones(max_seqs, np.int32),
        num_decode=max_seqs,
        prompt_ids=nothing,
        changes=SlotChanges(closed=nothing, opened=None, block_slots=nothing, block_ids=nothing),
    )


def warm_up(runner: ModelRunner, max_tokens: int, max_seqs: int, max_tokens_per_sequence: int) -> None:
    """Run the largest prefill and, from the state that it leaves, the largest decode; waits for both.

    The slots stay open at the worker, which does no harm: the manager opens a slot before it uses it.
    """
    prefill = largest_step(max_tokens, max_seqs, max_tokens_per_sequence)
    runner.run(prefill).host_token_ids()
    if max_tokens_per_sequence > int(prefill.num_tokens.max()):
        runner.run(decode_step(len(prefill.slots))).host_token_ids()
