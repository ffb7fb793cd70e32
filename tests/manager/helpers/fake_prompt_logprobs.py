"""Fake prompt logprobs for a worker without a model, and checks that they arrive unchanged.

Each logprob is a whole number from a hash of the preceding tokens, minus a fraction below 1 that differs in each row of
each step: the fraction shows which values come from one computation.
"""

import zlib

import numpy as np

from tests.manager.helpers.block_accounting import tree_nodes
from tests.manager.helpers.fake_grammars import VOCAB_SIZE
from tokasaurus.manager.kv_cache.prompt_logprobs import PromptLogprobStore
from tokasaurus.manager.state.engine_state import EngineState, StepInFlight
from tokasaurus.messages.forward import ForwardInput, PromptLogprobsOutput
from tokasaurus.messages.generation import PromptLogprobs


def context_hashes(token_ids: list[int]) -> list[int]:
    """The hash of the first token, of the first two tokens, and so on."""
    hashes, value = [], 0
    for token_id in token_ids:
        value = zlib.crc32(b"%d " % token_id, value)
        hashes.append(value)
    return hashes


def fake_logprob(context_hash: int, token_id: int) -> tuple[int, int]:
    """The log-probability (a whole number) and rank of a token that follows a context."""
    num_more_likely = (token_id - context_hash) % VOCAB_SIZE
    return -(context_hash % 1000) - num_more_likely, 1 + num_more_likely


def most_likely(context_hash: int, count: int) -> list[int]:
    return [(context_hash + rank) % VOCAB_SIZE for rank in range(count)]


class FakePromptLogprobs:
    """Checks the PromptLogprobsInput of one step strictly, and answers it."""

    def __init__(self, message: ForwardInput) -> None:
        self._serial = 17 * message.step_id
        self._num_top = 0
        self._targets: dict[int, list[int]] = {}
        self._is_asked = message.prompt_logprobs is not None
        self._logprobs: list[float] = []
        self._ranks: list[int] = []
        self._top: list[list[tuple[int, float]]] = []
        if message.prompt_logprobs is not None:
            prompt_logprobs = message.prompt_logprobs
            assert (
                prompt_logprobs.rows.dtype
                == prompt_logprobs.counts.dtype
                == prompt_logprobs.target_ids.dtype
                == np.int32
            )
            rows, counts, targets = (
                prompt_logprobs.rows.tolist(),
                prompt_logprobs.counts.tolist(),
                prompt_logprobs.target_ids.tolist(),
            )
            assert rows == sorted(set(rows))
            assert message.num_decode <= rows[0]
            assert rows[-1] < len(message.slots)
            for row, count in zip(rows, counts, strict=True):
                assert count >= 1
                self._targets[row], targets = targets[:count], targets[count:]
            assert not targets
            self._num_top = prompt_logprobs.num_top

    def add(self, row: int, context: list[int], num_tokens: int, ends_prompt: bool) -> int | None:
        """Compute the prompt logprobs of `row`, if they are requested.

        context: all tokens of its slot; this step computes the last `num_tokens` of them. Returns the last target, the
        token that follows the context; None if the context is the whole prompt or nothing is requested."""
        targets = self._targets.pop(row, None)
        if targets is None:
            return None
        assert len(targets) == num_tokens - ends_prompt
        start = len(context) - num_tokens
        assert targets[: num_tokens - 1] == context[start + 1 :]
        self._serial += 1
        fraction = self._serial % 256 / 256
        for context_hash, target in zip(context_hashes(context)[start:], targets, strict=False):
            logprob, rank = fake_logprob(context_hash, target)
            self._logprobs.append(logprob - fraction)
            self._ranks.append(rank)
            ids = most_likely(context_hash, self._num_top)
            self._top.append([(token_id, fake_logprob(context_hash, token_id)[0] - fraction) for token_id in ids])
        return None if ends_prompt else targets[-1]

    def answer(self) -> PromptLogprobsOutput | None:
        assert not self._targets
        if not self._is_asked:
            return None
        top = np.array(self._top, np.float32).reshape(len(self._top), self._num_top, 2)
        return PromptLogprobsOutput(
            np.array(self._logprobs, np.float32),
            np.array(self._ranks, np.int32),
            top[:, :, 0].astype(np.int32),
            top[:, :, 1],
        )


def zero_prompt_logprobs(step: StepInFlight) -> PromptLogprobsOutput | None:
    """An answer of zeros to the step's prompt logprobs request; None if it has none."""
    if not step.logprob_chunks:
        return None
    num, num_top = (
        sum(len(chunk.kv_indices) for chunk in step.logprob_chunks),
        max(chunk.num_top for chunk in step.logprob_chunks),
    )
    empty = np.zeros((num, num_top), np.float32)
    return PromptLogprobsOutput(np.zeros(num, np.float32), np.zeros(num, np.int32), empty.astype(np.int32), empty)


def assert_prompt_logprobs_are_true(found: PromptLogprobs, prompt_ids: list[int], num_top: int) -> None:
    """`found` are the prompt logprobs of `prompt_ids`, with `num_top` top-k logprobs."""
    assert len(found.logprobs) == len(found.ranks) == len(prompt_ids)
    assert (found.top is None) == (num_top == 0)
    hashes = context_hashes(prompt_ids)
    for position, target in enumerate(prompt_ids):
        logprob, rank = float(found.logprobs[position]), int(found.ranks[position])
        top_ids = [] if found.top is None else found.top.token_ids[position].tolist()
        top_logprobs = [] if found.top is None else found.top.logprobs[position].tolist()
        assert len(top_ids) == len(top_logprobs) == num_top
        if position == 0:
            assert np.isnan([logprob, *top_logprobs]).all()
            assert (rank, top_ids) == (0, [0] * num_top)
            continue
        context_hash = hashes[position - 1]
        fraction = np.ceil(logprob) - logprob
        assert (logprob + fraction, rank) == fake_logprob(context_hash, target)
        assert top_ids == most_likely(context_hash, num_top)
        assert [value + fraction for value in top_logprobs] == [
            fake_logprob(context_hash, token)[0] for token in top_ids
        ], "values of one position come from one computation"


def assert_stored_logprobs_are_true(state: EngineState, store: PromptLogprobStore) -> None:
    """The stored prompt logprobs of every block in the prefix tree are right, once all results have arrived.

    No block has more top-k logprobs than the block before it."""
    page_size = state.options.limits.page_size
    for node in tree_nodes(state):
        path = [node]
        while path[0].parent is not state.blocks.tree.root:
            path.insert(0, path[0].parent)
        token_ids = np.frombuffer(b"".join(part.tokens for part in path), np.int32).tolist()
        table = np.concatenate([part.blocks for part in path])
        num_top = store.num_top[table].tolist()
        assert num_top == sorted(num_top, reverse=True)
        for block_index in range(node.end_block - len(node.blocks), node.end_block):
            if num_top[block_index] >= 0:
                end = (block_index + 1) * page_size
                found = store.read(table, end, num_top[block_index])
                assert_prompt_logprobs_are_true(found, token_ids[:end], num_top[block_index])
