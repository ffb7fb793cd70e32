"""Which waiting sequences to admit: first a worst-case bound, then a KV simulation of every future step.

`admit_waiting` decides. `describe` finds what it needs to know about the candidates: their tokens, their expected
lengths, and the blocks that they share with the cache and with each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.engine.kv_forecast import (
    KVForecast,
    expected_decode_steps,
    forecast_kv,
    passing_blocks,
    wanted_prefill_rate,
)
from tokasaurus.manager.engine.lifecycle import admit
from tokasaurus.manager.kv_cache.prefix_tree import PrefixMatch, PrefixNode, PrefixTree
from tokasaurus.manager.kv_cache.prompt_logprobs import first_position, num_leading
from tokasaurus.manager.planning.kv_simulation import (
    SequenceLoads,
    SharedLoads,
    UsageCurve,
    fits_together,
    join_loads,
    simulate_kv,
    window_loads,
)
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Sequence
from tokasaurus.messages.status import WindowGroups

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
"""Most steps for which it waits: expected lengths change, and other sequences may come first."""

RUNNING_PER_UNTRIED = 1024
"""Admission stops searching once it leaves at most one sequence untried for this many running ones."""

FIRST_NODE_ALONE = -(1 << 30)
"""New nodes of prompts that share with no other candidate are numbered from here downwards, below all nodes of a
scratch tree."""

_NOW = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Consecutive candidates that are samples of one prompt.

    A sample that computes prompt logprobs always starts a new SampleGroup.
    """

    start: int
    """Index of the first sample among the candidates."""
    match: PrefixMatch
    """The cached prefix of the prompt, found in the prefix tree."""
    first_position: int
    """Prompt position where the first sample's prefill starts. The other samples start after the shared blocks, or at
    the last token."""
    num_cached_blocks: int
    """Blocks of the prompt in `match`, or in the prefix tree once the candidates before it are admitted."""
    path: list[tuple[int, int]]
    """(node, number of blocks used in it) for the whole prompt blocks that the samples share.

    An existing node of the tree is given by its index, a node that candidates will add by a negative number.
    """


@dataclass(frozen=True, slots=True)
class Candidates:
    """K waiting sequences, in admission order."""

    page_size: int
    windows: WindowGroups | None
    max_tokens: int
    """Prompt tokens of a step at most."""
    num_prompt_tokens: Int64Array
    """[K] tokens to prefill, cached ones included."""
    num_to_compute: Int64Array
    """[K] prompt tokens to compute, at least 1."""
    decode_steps: Int64Array
    """[K] expected decode steps after the prefill."""
    sample_groups: list[SampleGroup]
    """The candidates grouped by prompt, in the same order."""


def admit_waiting(state: EngineState) -> None:
    """Admit every waiting sequence that fits, in the order of the queue.

    A sequence that does not fit blocks all behind it; otherwise a long prompt might never be admitted.
    """
    state.admission.blocked_at = None
    num_left = _max_to_admit(state)
    for _ in range(MAX_ROUNDS):
        num_described = min(num_left, max(MIN_DESCRIBED, 2 * state.admission.batch))
        sequences = state.queues.first_waiting(min(len(state.slots.free), num_described))
        if not sequences:
            return
        candidates = describe(state, sequences)
        num_admitted, is_blocked = _admit_fitting(state, candidates)
        if is_blocked:
            state.admission.blocked_at = (state.next_step_id, state.slots.num_releases)
            return
        num_left -= num_admitted


def _max_to_admit(state: EngineState) -> int:
    """Most sequences that this call of `admit_waiting` may admit, at least MAX_ADMITTED."""
    num_new = state.slots.num_releases - state.admission.num_releases_seen
    state.admission.num_releases_seen = state.slots.num_releases
    state.admission.usual_releases += NEW_RELEASES_WEIGHT * (num_new - state.admission.usual_releases)
    return MAX_ADMITTED + int(2 * state.admission.usual_releases)


def can_admit(state: EngineState) -> bool:
    """Whether sequences wait, and enough has changed since the next one did not fit. Always if the worker is idle."""
    if not state.queues.num_waiting or state.is_paused:
        return False
    if state.admission.blocked_at is None or not state.steps_in_flight:
        return True
    step_id, num_releases = state.admission.blocked_at
    num_awaited = state.slots.num_running // RUNNING_PER_RELEASE
    return state.slots.num_releases - num_releases >= num_awaited or state.next_step_id - step_id >= MAX_STEPS_BLOCKED


def max_admitted_blocks(state: EngineState) -> int:
    """Most blocks that the sequences admitted are expected to use."""
    return int(state.blocks.num_blocks * state.options.config.spec_allocation_target_kv_cache_utilization)


def _admit_fitting(state: EngineState, candidates: Candidates) -> tuple[int, bool]:
    """Admit the first candidates that fit. Returns how many, and whether the next one does not fit."""
    admission, config = state.admission, state.options.config
    max_simulated = config.precise_onboard_batch_size
    num_blocks = max_admitted_blocks(state)
    rate = wanted_prefill_rate(state, candidates.num_to_compute, candidates.decode_steps)
    num_certain = num = num_certain_to_fit(state, candidates, num_blocks)
    num_considered = len(candidates.decode_steps)
    if num < num_considered and config.enable_precise_onboard:
        num_considered = min(num_considered, num_certain + max_simulated)
        new_left = candidates.num_to_compute
        new_starts = candidates.num_prompt_tokens - new_left
        kv_forecast = forecast_kv(state, rate, new_starts, new_left)
        if rate != admission.prefill_rate and state.slots.num_running and kv_forecast.curve.peak > num_blocks:
            # The running sequences do not fit at this rate, but did at the rate at which they were admitted.
            rate = admission.prefill_rate
            kv_forecast = forecast_kv(state, rate, new_starts, new_left)
        max_untried = state.slots.num_running // RUNNING_PER_UNTRIED
        num = num_fitting(candidates, num_certain, kv_forecast, num_blocks, admission.batch, max_simulated, max_untried)
        admission.batch = min(max_simulated, max(1, num))
    if num == 0 and not state.slots.num_running:
        num = 1  # a sequence always fits alone: the server rejects the others
    if num:
        admission.prefill_rate = rate
        admit_described(state, candidates, num)
    return num, num < num_considered


def admit_described(state: EngineState, candidates: Candidates, num: int) -> None:
    """Admit the first `num` candidates. Precondition: they fit, and the prefix tree is as it was described.

    All their cached prefixes are acquired first, so that the blocks allocated for one do not evict the prefix of
    another, which would then start later than simulated.
    """
    tree = state.blocks.tree
    sample_groups = [sample_group for sample_group in candidates.sample_groups if sample_group.start < num]
    cached = [tree.acquire(sample_group.match) for sample_group in sample_groups]
    state.blocks.evict_for(int(_num_prompt_blocks(candidates)[:num].sum()))
    ends = [*(sample_group.start for sample_group in sample_groups), num][1:]
    slots: list[int] = []
    for sample_group, node, end in zip(sample_groups, cached, ends, strict=True):
        sequence = state.queues.take_first_waiting()
        admit(state, sequence, node)
        slots.append(sequence.slot)
        if end - sample_group.start > 1:
            assert sequence.node is not None
            shared = PrefixMatch(sequence.node, sequence.num_tree_blocks)
            for _ in range(sample_group.start + 1, end):
                other = state.queues.take_first_waiting()
                admit(state, other, tree.acquire(shared))
                slots.append(other.slot)
    num_kept = candidates.num_prompt_tokens[:num] - state.slots.num_prompt_tokens[slots]
    state.slots.predicted_tokens[slots] = num_kept + candidates.decode_steps[:num] + 1


def _num_blocks_still_needed(state: EngineState) -> int:
    """Blocks that the running sequences will allocate beyond those they have, if none ended before another."""
    arrays, page_size = state.slots, state.options.limits.page_size
    slots = np.flatnonzero(arrays.is_running)
    num_kv_tokens = np.maximum(arrays.num_kv_tokens[slots], arrays.num_prefill_tokens[slots])
    num_tokens = num_kv_tokens + expected_decode_steps(state, slots)
    num_pages, num_covered = -(-num_tokens // page_size), arrays.num_covered_tokens[slots] // page_size
    num_needed = int((num_pages - num_covered).sum())
    if (windows := state.options.limits.windows) is not None:
        held, most = arrays.first_held[slots], windows.num_held(page_size)
        has_computed = arrays.num_kv_tokens[slots] >= arrays.num_prefill_tokens[slots]
        num_there = np.where(has_computed, np.minimum(num_covered - held, most), 0)
        num_sets = np.maximum(0, np.minimum(num_pages - held, most) - num_there)
        num_needed += windows.num_groups * int(num_sets.sum())
        kept = np.where(has_computed, 0, arrays.num_prefill_tokens[slots] - held * page_size)
        num_needed += passing_blocks(windows, page_size, kept, state.options.config.max_tokens_per_forward)
    return num_needed


def simulate_candidates(candidates: Candidates, num: int, kv_forecast: KVForecast) -> UsageCurve:
    """Blocks that the first `num` candidates, at least 1, need in addition to the running sequences.

    Samples of one prompt share its whole blocks. A cached block counts from the step after its last running user has
    freed it. A cached block without users counts from now, because it is evictable and so regarded as free. If a node
    is used to different depths, the larger number of blocks counts until the later end.
    """
    page_size = candidates.page_size
    num_tokens, num_steps = candidates.num_prompt_tokens[:num], candidates.decode_steps[:num]
    sample_groups = [sample_group for sample_group in candidates.sample_groups if sample_group.start < num]
    starts = np.array([sample_group.start for sample_group in sample_groups])
    prefill = kv_forecast.prefill.extend(candidates.num_to_compute[:num], num_steps)
    last_steps = prefill.start_steps + num_steps + kv_forecast.release_delay

    node_uses: dict[int, tuple[int, int]] = {}
    for sample_group, last_step in zip(sample_groups, np.maximum.reduceat(last_steps, starts).tolist(), strict=True):
        for node, num_blocks in sample_group.path:
            num_used, latest = node_uses.get(node, (0, -1))
            node_uses[node] = max(num_used, num_blocks), max(latest, last_step)
    nodes = np.fromiter(node_uses, np.int64, len(node_uses))
    blocks_and_ends = np.array(list(node_uses.values()), np.int64).reshape(-1, 2)
    first_steps = np.where(nodes > 0, kv_forecast.node_last_steps[np.maximum(nodes, 0)] + 1, 0)
    is_longer = blocks_and_ends[:, 1] >= first_steps
    shared = SharedLoads(blocks_and_ends[is_longer, 0], first_steps[is_longer], blocks_and_ends[is_longer, 1])
    own = SequenceLoads(num_tokens % page_size, prefill.start_steps, num_steps)
    if (windows := candidates.windows) is not None:
        own = join_loads(own, window_loads(windows, page_size, own.num_tokens, own.start_steps, num_steps))
        first_tokens, to_compute = num_tokens[starts], candidates.num_to_compute[starts]
        firsts = windows.first_seen(first_tokens - to_compute + 1) // page_size
        num_pages = np.minimum(first_tokens // page_size - firsts, windows.num_held(page_size))
        # The samples of a prompt see its last tokens, each until its own fill the window.
        seen_steps = prefill.start_steps + np.minimum(num_steps, abs(windows.window) + page_size)
        last_seen = np.maximum.reduceat(seen_steps, starts) + kv_forecast.release_delay
        for num_blocks, last_step in zip((windows.num_groups * num_pages).tolist(), last_seen.tolist(), strict=True):
            shared = shared.and_blocks(num_blocks, last_step)
        passing = passing_blocks(windows, page_size, first_tokens - firsts * page_size, candidates.max_tokens)
        shared = shared.and_blocks(passing, int(prefill.start_steps.max()))
    return simulate_kv(own, shared, page_size, kv_forecast.release_delay)


def num_certain_to_fit(state: EngineState, candidates: Candidates, num_blocks: int) -> int:
    """How many candidates fit into a pool of `num_blocks` even if they and all running sequences have their expected
    lengths at once, and the candidates share no blocks."""
    return num_obviously_fitting(candidates, num_blocks - state.blocks.num_used - _num_blocks_still_needed(state))


def num_obviously_fitting(candidates: Candidates, num_blocks: int) -> int:
    """How many candidates fit into `num_blocks` even if all have their expected length at once and share no blocks."""
    page_size, windows = candidates.page_size, candidates.windows
    num_at_end = -(-(candidates.num_prompt_tokens + candidates.decode_steps) // page_size)
    if windows is not None:
        most = windows.num_held(page_size, candidates.max_tokens)
        num_at_end += windows.num_groups * np.minimum(num_at_end, most)
    return int(np.searchsorted(np.cumsum(num_at_end), num_blocks, side="right"))


def num_fitting(
    candidates: Candidates,
    num_certain: int,
    kv_forecast: KVForecast,
    num_blocks: int,
    batch: int,
    max_simulated: int,
    max_untried: int = 0,
) -> int:
    """How many candidates fit according to the KV simulation, at most num_certain + max_simulated.

    The first `num_certain` are known to fit. Tries `batch` candidates more, then twice as many more each time. After
    the first group that does not fit, bisects, until at most `max_untried` others may fit as well.
    """
    num, limit = num_certain, min(len(candidates.decode_steps), num_certain + max_simulated) + 1
    num_free = num_blocks - int(kv_forecast.curve.at(_NOW)[0])
    # An upper bound: the prompts alone must fit now.
    num_prompts = int(np.searchsorted(np.cumsum(_num_prompt_blocks(candidates)), num_free, side="right"))
    limit = min(limit, num_prompts + 1)
    has_failed = False
    while num + 1 + (max_untried if has_failed and num > num_certain else 0) < limit:
        tried = num + (limit - num) // 2 if has_failed else min(num + batch, limit - 1)
        if fits_together(kv_forecast.curve, simulate_candidates(candidates, tried, kv_forecast), num_blocks):
            num, batch = tried, 2 * batch
        else:
            limit, has_failed = tried, True
    return num


def _num_prompt_blocks(candidates: Candidates) -> Int64Array:
    """[K] blocks to allocate when each candidate is admitted after those before it."""
    page_size = candidates.page_size
    num_prompt_blocks = -(-candidates.num_prompt_tokens // page_size)
    num_new: Int64Array = num_prompt_blocks - candidates.num_prompt_tokens // page_size
    starts = [sample_group.start for sample_group in candidates.sample_groups]
    num_new[starts] = num_prompt_blocks[starts] - [group.num_cached_blocks for group in candidates.sample_groups]
    return num_new


def describe(state: EngineState, sequences: list[Sequence]) -> Candidates:
    """What admission needs to know about the waiting `sequences`."""
    num_kept = np.array([len(sequence.kept_token_ids) for sequence in sequences])
    max_tokens = np.array([sequence.max_sampled_tokens for sequence in sequences])
    decode_steps = max_tokens - num_kept - 1
    if state.lengths.forecast is not None:
        ranks = state.slots.num_admissions + np.arange(len(sequences))
        expected = state.lengths.forecast.expected(num_kept, max_tokens, ranks) - num_kept - 1
        decode_steps = np.where([sequence.may_stop for sequence in sequences], expected, decode_steps)
    num_prompt_tokens = np.array([len(sequence.prompt) for sequence in sequences])
    page_size = state.options.limits.page_size
    sample_groups = _group_by_prompt(state, sequences)
    first_positions = np.minimum(num_prompt_tokens // page_size * page_size, num_prompt_tokens - 1)
    if state.blocks.snapshots is not None:  # of the first sample, where the others' states start
        first_positions = (num_prompt_tokens - 1) // page_size * page_size
    first_positions[[sample_group.start for sample_group in sample_groups]] = [
        sample_group.first_position for sample_group in sample_groups
    ]
    max_step_tokens = state.options.config.max_tokens_per_forward * state.options.num_microbatches
    fixed = page_size, state.options.limits.windows, max_step_tokens
    return Candidates(*fixed, num_prompt_tokens, num_prompt_tokens - first_positions, decode_steps, sample_groups)


class _CachedPrompt(NamedTuple):
    first: int
    """Index of its first sample among the candidates."""
    match: PrefixMatch
    key: bytes
    """Equal for prompts that continue the same cached prefix with the same block."""


def _group_by_prompt(state: EngineState, sequences: list[Sequence]) -> list[SampleGroup]:
    """Find each prompt's cached prefix and the prefix it shares with earlier candidates.

    Two prompts can share new blocks only if they continue the same cached prefix with the same block. Most prompts
    share with no other, and need no scratch tree.
    """
    tree, page_size = state.blocks.tree, state.options.limits.page_size
    block_bytes = 4 * page_size
    prompts: list[_CachedPrompt] = []
    num_with_key: dict[bytes, int] = {}
    prompt = None
    for index, sequence in enumerate(sequences):
        if sequence.prompt is prompt and not sequence.needs_prompt_logprobs:
            continue
        prompt = sequence.prompt
        num_tokens, token_bytes = len(prompt.token_ids), prompt.token_bytes
        match = tree.match(token_bytes, sequence.salt, num_tokens // page_size)
        start = match.num_blocks * block_bytes
        key = _branch(match, sequence.salt) + token_bytes[start : start + block_bytes]
        num_with_key[key] = num_with_key.get(key, 0) + 1
        prompts.append(_CachedPrompt(index, match, key))
    is_alone = [num_with_key[key] == 1 and not sequences[index].needs_prompt_logprobs for index, _, key in prompts]
    others = [prompt for prompt, alone in zip(prompts, is_alone, strict=True) if not alone]
    shared = {group.start: group for group in _share(state, sequences, others)} if others else {}
    new_nodes = count(FIRST_NODE_ALONE, -1)
    sample_groups = []
    for (index, match, _), alone in zip(prompts, is_alone, strict=True):
        if not alone:
            sample_groups.append(shared[index])
            continue
        num_tokens, num_cached = len(sequences[index].prompt.token_ids), match.num_blocks
        num_new = num_tokens // page_size - num_cached
        path = [(next(new_nodes), num_new)] if num_new else []
        path += _path_of_match(tree, match)
        start = min(num_cached * page_size, num_tokens - 1)
        if state.blocks.windows is not None or state.blocks.snapshots is not None:
            start = state.blocks.start(tree.blocks_on_path(match), start)
        sample_groups.append(SampleGroup(index, match, start, num_cached, path))
    return sample_groups


def _share(state: EngineState, sequences: list[Sequence], prompts: list[_CachedPrompt]) -> list[SampleGroup]:
    """The groups of prompts that may share blocks with each other, found with a scratch tree.

    In the scratch tree a prompt starts where its cached prefix ends. Block ids there follow all existing block ids.
    """
    tree, page_size = state.blocks.tree, state.options.limits.page_size
    block_bytes = 4 * page_size
    scratch_tree = PrefixTree(page_size)
    max_new = sum(len(sequences[index].prompt) for index, *_ in prompts) // page_size
    numbers, num_numbered = np.arange(max_new, dtype=np.int32) + len(state.blocks.tokens), 0
    reserved_num_top = np.empty(0, np.int32)
    if state.blocks.prompt_logprobs is not None and any(sequence.needs_prompt_logprobs for sequence in sequences):
        reserved_num_top = state.blocks.prompt_logprobs.reserved(max_new)
    found: list[tuple[int, int, int, PrefixMatch, PrefixNode]] = []
    for index, match, _ in prompts:
        sequence = sequences[index]
        prompt = sequence.prompt
        num_whole = len(prompt) // page_size
        branch = _branch(match, sequence.salt)
        rest = prompt.token_bytes[match.num_blocks * block_bytes : num_whole * block_bytes]
        scratch_match = scratch_tree.match(rest, branch)
        node = scratch_tree.acquire(scratch_match)
        num_cached = match.num_blocks + scratch_match.num_blocks
        new = numbers[num_numbered : num_numbered + num_whole - num_cached]
        num_numbered += len(new)
        start = min(num_cached * page_size, len(prompt) - 1)
        if sequence.needs_prompt_logprobs:
            cached = np.concatenate((tree.blocks_on_path(match), scratch_tree.blocks_on_path(scratch_match)))
            num_with_logprobs = _add_reservation(
                reserved_num_top, cached, new, sequence.request.num_top_prompt_logprobs
            )
            start = first_position(num_with_logprobs, page_size)
        if state.blocks.snapshots is not None or (state.blocks.windows is not None and not scratch_match.num_blocks):
            cached = tree.blocks_on_path(match)
            start = state.blocks.start(cached, min(start, len(cached) * page_size))
        if len(new):
            node = scratch_tree.insert(node, rest[scratch_match.num_blocks * block_bytes :], new, branch)
        found.append((index, start, num_cached, match, node))
    sample_groups = []
    for index, start, num_cached, match, node in found:
        path = [(-ancestor.index, len(ancestor.blocks)) for ancestor in _ancestors(scratch_tree, node)]
        path += _path_of_match(tree, match)
        sample_groups.append(SampleGroup(index, match, start, num_cached, path))
    return sample_groups


def _branch(match: PrefixMatch, salt: bytes) -> bytes:
    """Names the place where prompts continue a cached prefix."""
    return b"%d %d " % (match.node.index, match.num_blocks) + salt


def _path_of_match(tree: PrefixTree, match: PrefixMatch) -> list[tuple[int, int]]:
    """(node index, blocks used in it) for the nodes of a cached prefix."""
    path, end = [], match.num_blocks
    for ancestor in _ancestors(tree, match.node):
        path.append((ancestor.index, end - ancestor.parent.end_block))
        end = ancestor.parent.end_block
    return path


def _add_reservation(
    reserved_num_top: NDArray[np.int32], cached: NDArray[np.int32], new: NDArray[np.int32], num_top: int
) -> int:
    """Reserve prompt logprobs with top-k size `num_top` for a prompt's `cached` and `new` blocks.

    Updates `reserved_num_top`, by block id. Returns how many leading `cached` blocks already had enough reserved: the
    prompt need not compute logprobs for these.
    """
    num_with_logprobs = num_leading(reserved_num_top[cached], num_top)
    reserved_num_top[cached], reserved_num_top[new] = np.maximum(reserved_num_top[cached], num_top), num_top
    return num_with_logprobs


def _ancestors(tree: PrefixTree, node: PrefixNode) -> Iterator[PrefixNode]:
    """The node and its ancestors, without the root."""
    while node is not tree.root:
        yield node
        node = node.parent
