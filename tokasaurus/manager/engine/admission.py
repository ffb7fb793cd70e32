"""Which waiting sequences to admit: first a worst-case bound, then a KV simulation of every future step."""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.engine.candidates import Candidates, describe
from tokasaurus.manager.engine.kv_forecast import KVForecast, expected_decode_steps, forecast_kv, wanted_prefill_rate
from tokasaurus.manager.engine.lifecycle import admit
from tokasaurus.manager.kv_cache.prefix_tree import PrefixMatch
from tokasaurus.manager.planning.kv_simulation import (
    SequenceLoads,
    SharedLoads,
    UsageCurve,
    fits_together,
    simulate_kv,
)
from tokasaurus.manager.state.engine_state import EngineState

Int64Array = NDArray[np.int64]

MIN_DESCRIBED = 8
"""Fewest candidates considered together."""

MAX_ROUNDS = 4
"""Most groups of candidates admitted in one step; the worker may idle meanwhile."""

MAX_ADMITTED = 96
"""Most sequences admitted in one step, so that it takes a few milliseconds however many samples a request has. Twice
the usual number of sequences that leave may come on top: else a batch of short completions would shrink."""

NEW_RELEASES_WEIGHT = 0.1
"""Weight of the newest number in the moving average of sequences that leave between two admissions."""

RUNNING_PER_RELEASE = 256
"""While the next sequence does not fit, admission waits until one in this many running sequences has left. Every
round costs about as much as ending ten sequences, and a batch that lacks one sequence in 256 is hardly smaller."""

MAX_STEPS_BLOCKED = 4
"""Most steps that admission waits so: expected lengths change, and other sequences may come first."""

RUNNING_PER_UNTRIED = 1024
"""Admission stops searching once it leaves at most one sequence untried for this many running ones."""

_NOW = np.zeros(1, np.int64)


def simulate_candidates(candidates: Candidates, num: int, kv_forecast: KVForecast, page_size: int) -> UsageCurve:
    """Blocks that the first `num` candidates, at least 1, need in addition to the running sequences.

    Samples of one prompt share its whole blocks. A cached block counts from the step after its last running user has
    freed it. A cached block without users counts from now, because it is evictable and so regarded as free. If a node
    is used to different depths, the larger number of blocks counts until the later end.
    """
    num_tokens, num_steps = candidates.num_prompt_tokens[:num], candidates.decode_steps[:num]
    sample_groups = [sample_group for sample_group in candidates.sample_groups if sample_group.start < num]
    starts = np.array([sample_group.start for sample_group in sample_groups])
    num_shared = (num_tokens - 1) // page_size  # each sample has its own block for the last token
    prefill = kv_forecast.prefill.extend(candidates.num_to_compute[:num], num_steps)
    last_steps = prefill.start_steps + num_steps + kv_forecast.release_delay
    num_own_tokens = num_tokens - num_shared * page_size

    node_uses: dict[int, tuple[int, int]] = {}
    for sample_group, last_step in zip(sample_groups, np.maximum.reduceat(last_steps, starts).tolist(), strict=True):
        for node, num_blocks in sample_group.path:
            most, latest = node_uses.get(node, (0, -1))
            node_uses[node] = max(most, num_blocks), max(latest, last_step)
    for sample_group in sample_groups:
        if sample_group.last_node is not None:
            _, latest = node_uses.get(sample_group.last_node, (1, -1))
            node_uses[sample_group.last_node] = 1, max(latest, int(last_steps[sample_group.start]))
            num_own_tokens[sample_group.start] = 0
    nodes = np.fromiter(node_uses, np.int64, len(node_uses))
    blocks_and_ends = np.array(list(node_uses.values()), np.int64).reshape(-1, 2)
    first_steps = np.where(nodes > 0, kv_forecast.node_last_steps[np.maximum(nodes, 0)] + 1, 0)
    is_longer = blocks_and_ends[:, 1] >= first_steps
    shared = SharedLoads(blocks_and_ends[is_longer, 0], first_steps[is_longer], blocks_and_ends[is_longer, 1])
    own = SequenceLoads(num_own_tokens, prefill.start_steps, num_steps)
    return simulate_kv(own, shared, page_size, kv_forecast.release_delay)


def num_obviously_fitting(candidates: Candidates, num_blocks: int, page_size: int) -> int:
    """How many candidates fit into `num_blocks` even if all reach full length at once and share no blocks."""
    most = -(-(candidates.num_prompt_tokens + candidates.decode_steps) // page_size)
    return int(np.searchsorted(np.cumsum(most), num_blocks, side="right"))


def num_fitting(
    candidates: Candidates,
    num_certain: int,
    kv_forecast: KVForecast,
    num_blocks: int,
    page_size: int,
    batch: int,
    most: int,
    max_untried: int = 0,
) -> int:
    """How many candidates fit according to the KV simulation, at most num_certain + most.

    The first `num_certain` are known to fit. Tries `batch` candidates more, then twice as many more each time. After
    the first group that does not fit, bisects, until at most `max_untried` others may fit as well.
    """
    num, limit = num_certain, min(len(candidates.decode_steps), num_certain + most) + 1
    limit = min(
        limit, _num_prompts_with_room(candidates, num_blocks - int(kv_forecast.curve.at(_NOW)[0]), page_size) + 1
    )
    has_failed = False
    while num + 1 + (max_untried if has_failed and num > num_certain else 0) < limit:
        tried = num + (limit - num) // 2 if has_failed else min(num + batch, limit - 1)
        if fits_together(kv_forecast.curve, simulate_candidates(candidates, tried, kv_forecast, page_size), num_blocks):
            num, batch = tried, 2 * batch
        else:
            limit, has_failed = tried, True
    return num


def _num_prompts_with_room(candidates: Candidates, num_blocks: int, page_size: int) -> int:
    """How many candidates' prompts alone fit into `num_blocks`: an upper bound on the number to admit."""
    return int(np.searchsorted(np.cumsum(_num_prompt_blocks(candidates, page_size)), num_blocks, side="right"))


def _num_prompt_blocks(candidates: Candidates, page_size: int) -> Int64Array:
    """[K] blocks to allocate when each candidate is admitted after those before it."""
    num_prompt_blocks = -(-candidates.num_prompt_tokens // page_size)
    num_new: Int64Array = num_prompt_blocks - (candidates.num_prompt_tokens - 1) // page_size
    starts = [sample_group.start for sample_group in candidates.sample_groups]
    num_new[starts] = num_prompt_blocks[starts] - [group.num_cached_blocks for group in candidates.sample_groups]
    return num_new


def admit_waiting(state: EngineState) -> None:
    """Admit every waiting sequence that fits, in the order of the queue.

    A sequence that does not fit blocks all behind it; otherwise a long prompt might never be admitted.
    """
    state.blocked_admission = None
    num_left = _max_to_admit(state)
    for _ in range(MAX_ROUNDS):
        num_described = min(num_left, max(MIN_DESCRIBED, 2 * state.onboard_batch))
        sequences = state.queues.first_waiting(min(len(state.free_slots), num_described))
        if not sequences:
            return
        candidates = describe(state, sequences)
        num_admitted, is_blocked = _admit_fitting(state, candidates)
        if is_blocked:
            state.blocked_admission = (state.next_step_id, state.num_releases)
            return
        num_left -= num_admitted


def _max_to_admit(state: EngineState) -> int:
    """Most sequences that this call of `admit_waiting` may admit, at least MAX_ADMITTED."""
    num_new = state.num_releases - state.num_releases_counted
    state.num_releases_counted = state.num_releases
    state.usual_releases += NEW_RELEASES_WEIGHT * (num_new - state.usual_releases)
    return MAX_ADMITTED + int(2 * state.usual_releases)


def can_admit(state: EngineState) -> bool:
    """Whether sequences wait, and enough has changed since the next one did not fit. Always if the worker is idle."""
    if not state.queues.num_waiting:
        return False
    if state.blocked_admission is None or not state.steps_in_flight:
        return True
    step_id, num_releases = state.blocked_admission
    num_awaited = state.num_running // RUNNING_PER_RELEASE
    return state.num_releases - num_releases >= num_awaited or state.next_step_id - step_id >= MAX_STEPS_BLOCKED


def _admit_fitting(state: EngineState, candidates: Candidates) -> tuple[int, bool]:
    """Admit the first candidates that fit. Returns how many, and whether the next one does not fit."""
    page_size, max_at_once = state.options.limits.page_size, state.options.onboard_batch_size
    num_blocks = int(state.blocks.num_blocks * state.options.target_utilization)
    rate = wanted_prefill_rate(state, candidates.num_to_compute, candidates.decode_steps)
    num_unreserved = num_blocks - state.blocks.num_used - _num_blocks_still_needed(state)
    num_certain = num = num_obviously_fitting(candidates, num_unreserved, page_size)
    most = len(candidates.decode_steps)
    if num < most and max_at_once is not None:
        most = min(most, num_certain + max_at_once)
        kv_forecast = forecast_kv(state, rate, candidates)
        if rate != state.prefill_rate and state.num_running and kv_forecast.curve.peak > num_blocks:
            # The running sequences do not fit at this rate, but did at the rate at which they were admitted.
            rate = state.prefill_rate
            kv_forecast = forecast_kv(state, rate, candidates)
        num = num_fitting(
            *(candidates, num_certain, kv_forecast, num_blocks, page_size, state.onboard_batch, max_at_once),
            max_untried=state.num_running // RUNNING_PER_UNTRIED,
        )
        state.onboard_batch = min(max_at_once, max(1, num))
    if num == 0 and not state.num_running:
        num = 1  # a sequence always fits alone: the server rejects the others
    if num:
        state.prefill_rate = rate
        admit_described(state, candidates, num)
    return num, num < most


def admit_described(state: EngineState, candidates: Candidates, num: int) -> None:
    """Admit the first `num` candidates. Precondition: they fit, and the prefix tree is as it was described.

    All their cached prefixes are acquired first, so that the blocks allocated for one do not evict the prefix of
    another, which would then start later than simulated.
    """
    tree, page_size = state.blocks.tree, state.options.limits.page_size
    sample_groups = [sample_group for sample_group in candidates.sample_groups if sample_group.start < num]
    cached = [tree.acquire(sample_group.match) for sample_group in sample_groups]
    state.blocks.evict_for(int(_num_prompt_blocks(candidates, page_size)[:num].sum()))
    ends = [*(sample_group.start for sample_group in sample_groups), num][1:]
    for sample_group, node, end in zip(sample_groups, cached, ends, strict=True):
        sequence = state.queues.take_first_waiting()
        admit(state, sequence, node)
        if end - sample_group.start > 1:
            assert sequence.node is not None
            num_shared = (len(sequence.prompt) - 1) // page_size
            shared = PrefixMatch(sequence.node, sequence.node.end_block).first_blocks(num_shared)
            for _ in range(sample_group.start + 1, end):
                admit(state, state.queues.take_first_waiting(), tree.acquire(shared))


def _num_blocks_still_needed(state: EngineState) -> int:
    """Blocks that the running sequences will allocate beyond those they have, if none ended before another."""
    arrays, page_size = state.slots, state.options.limits.page_size
    slots = np.flatnonzero(arrays.is_running)
    num_kv_tokens = np.maximum(arrays.num_kv_tokens[slots], arrays.num_prefill_tokens[slots])
    num_tokens = num_kv_tokens + expected_decode_steps(state, slots)
    return int((-(-num_tokens // page_size) - arrays.num_covered_tokens[slots] // page_size).sum())
