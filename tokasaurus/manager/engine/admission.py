"""Which waiting sequences may start: what obviously fits, then what a simulation of every future step says fits."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.engine.kv_forecast import KVForecast, expected_decode_steps, forecast_kv, wanted_prefill_rate
from tokasaurus.manager.engine.lifecycle import admit
from tokasaurus.manager.kv_cache.prefix_tree import PrefixMatch, PrefixNode, PrefixTree
from tokasaurus.manager.kv_cache.prompt_logprobs import first_position, num_leading
from tokasaurus.manager.planning.kv_simulation import (
    SequenceLoads,
    SharedLoads,
    UsageCurve,
    fits_together,
    simulate_kv,
)
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Sequence

Int64Array = NDArray[np.int64]

MIN_DESCRIBED = 8
"""Candidates looked at together, at least."""

MOST_ROUNDS = 4
"""Groups admitted in one turn, at most; the worker waits meanwhile."""

_NOW = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class Family:
    """Samples of one prompt that follow each other among the candidates; one whose prompt is scored is the first.

    start: place of the first of them. first_position: where it begins to compute; the others begin behind the blocks
    that all of them share. num_cached_blocks: blocks of the prompt that the prefix tree has, or will have
    when the candidates before it are admitted.
    path: where the whole blocks of the prompt are that the samples share: nodes, with the number of blocks in each.
    Nodes of the tree by their index; nodes that candidates will bring into it by negative numbers.
    last_node: the node of the block that is whole but that the first alone has, for it holds the prompt's last token;
    None where there is none.
    """

    start: int
    first_position: int
    num_cached_blocks: int
    path: list[tuple[int, int]]
    last_node: int | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """K waiting sequences, first come first. All int64 [K]; num_to_compute: of the prompt's tokens, at least 1."""

    num_prompt_tokens: Int64Array
    num_to_compute: Int64Array
    decode_steps: Int64Array
    families: list[Family]


def describe(state: EngineState, sequences: list[Sequence]) -> Candidates:
    """What admission has to know of waiting `sequences`."""
    num_kept = np.array([len(sequence.kept_token_ids) for sequence in sequences])
    max_tokens = np.array([sequence.max_sampled_tokens for sequence in sequences])
    decode_steps = max_tokens - num_kept - 1
    if state.forecast is not None:
        ranks = state.num_admissions + np.arange(len(sequences))
        expected = state.forecast.expected(num_kept, max_tokens, ranks) - num_kept - 1
        decode_steps = np.where([sequence.may_stop for sequence in sequences], expected, decode_steps)
    num_prompt_tokens = np.array([len(sequence.prompt) for sequence in sequences])
    page_size = state.options.limits.page_size
    families = _families(state, sequences)
    first_positions = (num_prompt_tokens - 1) // page_size * page_size
    first_positions[[family.start for family in families]] = [family.first_position for family in families]
    return Candidates(num_prompt_tokens, num_prompt_tokens - first_positions, decode_steps, families)


def _families(state: EngineState, sequences: list[Sequence]) -> list[Family]:
    """What of each prompt is cached, and what prompts share with those before them, found by putting them into a tree
    of their own, in which a prompt begins where its cached part ends. Its blocks have the numbers behind all that there
    are."""
    tree, page_size = state.blocks.tree, state.options.limits.page_size
    block_bytes = 4 * page_size
    to_come = PrefixTree(page_size)
    most_new = sum(len(sequence.prompt) for sequence in sequences) // page_size
    numbers, num_numbered = np.arange(most_new, dtype=np.int32) + len(state.blocks.tokens), 0
    promised = np.empty(0, np.int32)
    if state.blocks.scores is not None and any(sequence.scores_prompt for sequence in sequences):
        promised = state.blocks.scores.reserved(most_new)
    found: list[tuple[int, int, int, PrefixMatch, PrefixNode, int | None]] = []
    prompt = None
    for place, sequence in enumerate(sequences):
        if sequence.prompt is prompt and not sequence.scores_prompt:
            continue
        prompt = sequence.prompt
        num_whole, num_shared = len(prompt) // page_size, (len(prompt) - 1) // page_size
        match = tree.match(prompt.token_bytes, sequence.salt, num_shared)
        branch = b"%d %d " % (match.node.index, match.num_blocks) + sequence.salt
        rest = prompt.token_bytes[match.num_blocks * block_bytes : num_shared * block_bytes]
        more = to_come.match(rest, branch)
        node = to_come.acquire(more)
        num_cached = match.num_blocks + more.num_blocks
        new = numbers[num_numbered : num_numbered + num_whole - num_cached]
        num_numbered += len(new)
        start = num_cached * page_size
        if sequence.scores_prompt:
            cached = np.concatenate((tree.blocks_on_path(match), to_come.blocks_on_path(more)))
            num_scored = _add_reservation(promised, cached, new, sequence.request.num_top_prompt_logprobs)
            start = first_position(num_scored, page_size)
        num_new = num_shared - num_cached
        if num_new:
            node = to_come.insert(node, rest[more.num_blocks * block_bytes :], new[:num_new], branch)
        last_node = None
        if num_whole > num_shared and tree.match(prompt.token_bytes, sequence.salt, num_whole).num_blocks < num_whole:
            last_bytes = prompt.token_bytes[num_shared * block_bytes : num_whole * block_bytes]
            last = to_come.insert(node, last_bytes, new[num_new:], branch)
            last_node = None if last is node else -last.index
        found.append((place, start, num_cached, match, node, last_node))
    families = []
    for place, start, num_cached, match, node, last_node in found:
        path = [(-ancestor.index, len(ancestor.blocks)) for ancestor in _ancestors(to_come, node)]
        end = match.num_blocks
        for ancestor in _ancestors(tree, match.node):
            path.append((ancestor.index, end - ancestor.parent.end_block))
            end = ancestor.parent.end_block
        families.append(Family(place, start, num_cached, path, last_node))
    return families


def _add_reservation(
    promised: NDArray[np.int32], cached: NDArray[np.int32], new: NDArray[np.int32], num_top: int
) -> int:
    """How many of the `cached` blocks, from the first on, a prompt need not score, for it is `promised` that they will
    be. It promises the others and the `new` ones behind them."""
    num_scored = num_leading(promised[cached], num_top)
    promised[cached], promised[new] = np.maximum(promised[cached], num_top), num_top
    return num_scored


def _ancestors(tree: PrefixTree, node: PrefixNode) -> Iterator[PrefixNode]:
    """The node itself and those above it, without the root."""
    while node is not tree.root:
        yield node
        node = node.parent


def simulate_candidates(candidates: Candidates, num: int, kv_forecast: KVForecast, page_size: int) -> UsageCurve:
    """The blocks that the first `num` candidates, at least 1, need beyond those that run.

    The samples of a family share the whole blocks of their prompt. A cached block counts from when the last of those
    that hold it now is gone; so does one that nobody holds, for it is free to be evicted until somebody does. Of a node
    used to different depths, the larger counts until the later end.
    """
    num_tokens, num_steps = candidates.num_prompt_tokens[:num], candidates.decode_steps[:num]
    families = [family for family in candidates.families if family.start < num]
    starts = np.array([family.start for family in families])
    num_shared = (num_tokens - 1) // page_size  # the block of the last token is each one's own
    prefill = kv_forecast.prefill.extend(candidates.num_to_compute[:num], num_steps)
    last_steps = prefill.start_steps + num_steps + kv_forecast.release_delay
    num_own_tokens = num_tokens - num_shared * page_size

    held: dict[int, tuple[int, int]] = {}
    for family, last_step in zip(families, np.maximum.reduceat(last_steps, starts).tolist(), strict=True):
        for node, num_blocks in family.path:
            most, latest = held.get(node, (0, -1))
            held[node] = max(most, num_blocks), max(latest, last_step)
    for family in families:
        if family.last_node is not None:
            _, latest = held.get(family.last_node, (1, -1))
            held[family.last_node] = 1, max(latest, int(last_steps[family.start]))
            num_own_tokens[family.start] = 0
    nodes = np.fromiter(held, np.int64, len(held))
    blocks_and_ends = np.array(list(held.values()), np.int64).reshape(-1, 2)
    first_steps = np.where(nodes > 0, kv_forecast.node_last_steps[np.maximum(nodes, 0)] + 1, 0)
    is_longer = blocks_and_ends[:, 1] >= first_steps
    shared = SharedLoads(blocks_and_ends[is_longer, 0], first_steps[is_longer], blocks_and_ends[is_longer, 1])
    own = SequenceLoads(num_own_tokens, prefill.start_steps, num_steps)
    return simulate_kv(own, shared, page_size, kv_forecast.release_delay)


def num_obviously_fitting(candidates: Candidates, num_blocks: int, page_size: int) -> int:
    """How many candidates fit into `num_blocks` even if all of them are at their longest at once and share nothing."""
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
) -> int:
    """How many candidates fit by simulation, of which the first `num_certain` are known to; at most `most` more.

    Groups are added, the first of `batch` candidates, each twice as large as the one before. Where one does not fit,
    half of it is tried, and so on until it is known how many do.
    """
    num, limit = num_certain, min(len(candidates.decode_steps), num_certain + most) + 1
    limit = min(
        limit, _num_prompts_with_room(candidates, num_blocks - int(kv_forecast.curve.at(_NOW)[0]), page_size) + 1
    )
    has_failed = False
    while num + 1 < limit:
        tried = num + (limit - num) // 2 if has_failed else min(num + batch, limit - 1)
        if fits_together(kv_forecast.curve, simulate_candidates(candidates, tried, kv_forecast, page_size), num_blocks):
            num, batch = tried, 2 * batch
        else:
            limit, has_failed = tried, True
    return num


def _num_prompts_with_room(candidates: Candidates, num_blocks: int, page_size: int) -> int:
    """How many candidates' prompts alone fit into `num_blocks`; more of them cannot run."""
    num_prompt_blocks = -(-candidates.num_prompt_tokens // page_size)
    num_new = num_prompt_blocks - (candidates.num_prompt_tokens - 1) // page_size
    for family in candidates.families:
        num_new[family.start] = num_prompt_blocks[family.start] - family.num_cached_blocks
    return int(np.searchsorted(np.cumsum(num_new), num_blocks, side="right"))


def admit_waiting(state: EngineState) -> None:
    """Admit all that may start, first come first served: one that does not fit holds back all behind it, or a long
    prompt would never get in."""
    for _ in range(MOST_ROUNDS):
        num_described = max(MIN_DESCRIBED, 2 * state.onboard_batch)
        sequences = state.queues.first_waiting(min(len(state.free_slots), num_described))
        if not sequences:
            return
        candidates = describe(state, sequences)
        num_admitted, is_all = _admit_fitting(state, candidates)
        if is_all and num_admitted < len(sequences):
            return


def _admit_fitting(state: EngineState, candidates: Candidates) -> tuple[int, bool]:
    """Admit the first candidates that fit. How many were admitted, and whether that is all that fit."""
    page_size, most_at_once = state.options.limits.page_size, state.options.onboard_batch_size
    num_blocks = int(state.blocks.num_blocks * state.options.target_utilization)
    rate = wanted_prefill_rate(state, candidates.num_to_compute, candidates.decode_steps)
    num_unpromised = num_blocks - state.blocks.num_used - _num_blocks_to_come(state)
    num_certain = num = num_obviously_fitting(candidates, num_unpromised, page_size)
    if num < len(candidates.decode_steps) and most_at_once is not None:
        kv_forecast = forecast_kv(state, rate)
        if rate != state.prefill_rate and state.num_running and kv_forecast.curve.peak > num_blocks:
            # Those that run were admitted at another rate, at which they fit.
            rate = state.prefill_rate
            kv_forecast = forecast_kv(state, rate)
        num = num_fitting(
            candidates, num_certain, kv_forecast, num_blocks, page_size, state.onboard_batch, most_at_once
        )
        state.onboard_batch = min(most_at_once, max(1, num))
    if num == 0 and not state.num_running:
        num = 1  # alone, each fits: the server has refused what does not
    if num:
        state.prefill_rate = rate
    num_admitted = _admit_described(state, candidates, num_certain, num)
    return num_admitted, num_admitted == num


def _admit_described(state: EngineState, candidates: Candidates, num_certain: int, num: int) -> int:
    """Admit the first `num` candidates, as long as they are what they were simulated to be. How many that was.

    One that was admitted before may have had the cached prefix of another evicted: then that one starts later than it
    was simulated to, and so do those behind it. Where all are certain to fit, they do so at any time.
    """
    tree, page_size = state.blocks.tree, state.options.limits.page_size
    families = {family.start: family for family in candidates.families} if num > num_certain else {}
    for place in range(num):
        sequence = state.queues.take_first_waiting()
        family = families.get(place)
        if family is not None:
            most_blocks = (len(sequence.prompt) - 1) // page_size
            match = tree.match(sequence.prompt.token_bytes, sequence.salt, most_blocks)
            if match.num_blocks != family.num_cached_blocks:
                state.queues.add_waiting(sequence, first=True)
                return place
        admit(state, sequence)
    return num


def _num_blocks_to_come(state: EngineState) -> int:
    """Blocks that the running sequences will take beyond those they have, if none of them ended before another."""
    arrays, page_size = state.slots, state.options.limits.page_size
    slots = np.flatnonzero(arrays.is_running)
    num_kv_tokens = np.maximum(arrays.num_kv_tokens[slots], arrays.num_prefill_tokens[slots])
    num_tokens = num_kv_tokens + expected_decode_steps(state, slots)
    return int((-(-num_tokens // page_size) - arrays.num_covered_tokens[slots] // page_size).sum())
