"""Which waiting sequences may start: what obviously fits, then what a simulation of every future step says fits."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.block_usage import SequenceLoads, SharedLoads, UsageCurve, fits_together, simulate_usage
from tokasaurus.manager.holdings import admit
from tokasaurus.manager.outlook import Outlook, expected_decode_steps, look_ahead
from tokasaurus.manager.sequence import Sequence
from tokasaurus.manager.state import EngineState

Int64Array = NDArray[np.int64]

MIN_DESCRIBED = 8
"""Candidates looked at together, at least."""

_NOW = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Waiting sequences, first come first. K of them, of F families: samples of one prompt that follow each other.

    num_prompt_tokens, decode_steps: int64 [K]. families: int64 [K], rising from 0.
    family_starts: int64 [F], the first of each.
    num_cached_blocks: int64 [F], blocks of the prompt that are in the prefix tree. paths: for each family the nodes
    that these blocks are in, with the number of blocks in each.
    """

    num_prompt_tokens: Int64Array
    decode_steps: Int64Array
    families: Int64Array
    family_starts: Int64Array
    num_cached_blocks: Int64Array
    paths: list[list[tuple[int, int]]]


def describe(state: EngineState, sequences: list[Sequence]) -> Candidates:
    """What admission has to know of waiting `sequences`."""
    tree, page_size = state.blocks.tree, state.options.limits.page_size
    families: list[int] = []
    family_starts: list[int] = []
    num_cached_blocks: list[int] = []
    paths: list[list[tuple[int, int]]] = []
    prompt = None
    for place, sequence in enumerate(sequences):
        if sequence.prompt is not prompt:
            prompt = sequence.prompt
            match = tree.match(prompt.token_bytes, sequence.salt, (len(prompt) - 1) // page_size)
            path, end, node = [], match.num_blocks, match.node
            while node is not tree.root:
                path.append((node.index, end - node.parent.end_block))
                end, node = node.parent.end_block, node.parent
            family_starts.append(place)
            num_cached_blocks.append(match.num_blocks)
            paths.append(path)
        families.append(len(family_starts) - 1)
    num_kept = np.array([len(sequence.kept_token_ids) for sequence in sequences])
    max_new_tokens = np.array([sequence.request.max_new_tokens for sequence in sequences])
    decode_steps = max_new_tokens - num_kept - 1
    if state.forecast is not None:
        ranks = state.num_admissions + np.arange(len(sequences))
        expected = state.forecast.expected(num_kept, max_new_tokens, ranks) - num_kept - 1
        decode_steps = np.where([sequence.request.ignore_eos for sequence in sequences], decode_steps, expected)
    return Candidates(
        num_prompt_tokens=np.array([len(sequence.prompt) for sequence in sequences]),
        decode_steps=decode_steps,
        families=np.array(families),
        family_starts=np.array(family_starts),
        num_cached_blocks=np.array(num_cached_blocks),
        paths=paths,
    )


def simulate_candidates(candidates: Candidates, num: int, outlook: Outlook, page_size: int) -> UsageCurve:
    """The blocks that the first `num` candidates, at least 1, need beyond those that run.

    The samples of a family share the whole blocks of their prompt. A cached block counts from when the last of those
    that hold it now is gone; so does one that nobody holds, for it is free to be evicted until somebody does. Prefixes
    that only candidates share, of different prompts, are counted more than once: too much, never too little.
    """
    num_tokens, num_steps = candidates.num_prompt_tokens[:num], candidates.decode_steps[:num]
    families = candidates.families[:num]
    num_families = int(families[-1]) + 1
    starts = candidates.family_starts[:num_families]
    num_shared = (num_tokens - 1) // page_size  # the block of the last token is each one's own
    num_computed = num_shared.copy()
    num_computed[starts] = candidates.num_cached_blocks[:num_families]
    prefill = outlook.prefill.extend(num_tokens - num_computed * page_size, num_steps)
    last_steps = prefill.start_steps + num_steps + outlook.hold_steps
    family_last_steps = np.maximum.reduceat(last_steps, starts)

    held: dict[int, tuple[int, int]] = {}
    for path, last_step in zip(candidates.paths, family_last_steps.tolist(), strict=False):
        for node, num_blocks in path:
            most, latest = held.get(node, (0, -1))
            held[node] = max(most, num_blocks), max(latest, last_step)
    nodes = np.fromiter(held, np.int64, len(held))
    cached = np.array(list(held.values()), np.int64).reshape(-1, 2)
    first_steps = outlook.node_last_steps[nodes] + 1
    is_longer = cached[:, 1] >= first_steps
    shared = SharedLoads(
        np.concatenate((num_shared[starts] - num_computed[starts], cached[is_longer, 0])),
        np.concatenate((np.zeros(num_families, np.int64), first_steps[is_longer])),
        np.concatenate((family_last_steps, cached[is_longer, 1])),
    )
    own = SequenceLoads(num_tokens - num_shared * page_size, prefill.start_steps, num_steps)
    return simulate_usage(own, shared, page_size, outlook.hold_steps)


def num_obviously_fitting(candidates: Candidates, num_blocks: int, page_size: int) -> int:
    """How many candidates fit into `num_blocks` even if all of them are at their longest at once and share nothing."""
    most = -(-(candidates.num_prompt_tokens + candidates.decode_steps) // page_size)
    return int(np.searchsorted(np.cumsum(most), num_blocks, side="right"))


def num_fitting(
    candidates: Candidates, num_certain: int, outlook: Outlook, num_blocks: int, page_size: int, batch: int, most: int
) -> int:
    """How many candidates fit by simulation, of which the first `num_certain` are known to; at most `most` more.

    Groups are added, the first of `batch` candidates, each twice as large as the one before. Where one does not fit,
    half of it is tried, and so on until it is known how many do.
    """
    num, limit = num_certain, min(len(candidates.families), num_certain + most) + 1
    limit = min(limit, _num_prompts_with_room(candidates, num_blocks - int(outlook.curve.at(_NOW)[0]), page_size) + 1)
    has_failed = False
    while num + 1 < limit:
        tried = num + (limit - num) // 2 if has_failed else min(num + batch, limit - 1)
        if fits_together(outlook.curve, simulate_candidates(candidates, tried, outlook, page_size), num_blocks):
            num, batch = tried, 2 * batch
        else:
            limit, has_failed = tried, True
    return num


def _num_prompts_with_room(candidates: Candidates, num_blocks: int, page_size: int) -> int:
    """How many candidates' prompts alone fit into `num_blocks`; more of them cannot run."""
    num_prompt_blocks = -(-candidates.num_prompt_tokens // page_size)
    num_new = num_prompt_blocks - (candidates.num_prompt_tokens - 1) // page_size
    starts = candidates.family_starts
    num_new[starts] = num_prompt_blocks[starts] - candidates.num_cached_blocks
    return int(np.searchsorted(np.cumsum(num_new), num_blocks, side="right"))


def admit_waiting(state: EngineState) -> None:
    """Admit all that may start, first come first served: one that does not fit holds back all behind it, or a long
    prompt would never get in."""
    page_size, most_at_once = state.options.limits.page_size, state.options.onboard_batch_size
    num_blocks = int(state.blocks.num_blocks * state.options.target_utilization)
    while True:
        batch = state.onboard_batch
        sequences = state.queues.first_waiting(min(len(state.free_slots), max(MIN_DESCRIBED, 2 * batch)))
        if not sequences:
            return
        candidates = describe(state, sequences)
        num_unpromised = num_blocks - state.blocks.num_used - _num_blocks_to_come(state)
        num_certain = num = num_obviously_fitting(candidates, num_unpromised, page_size)
        if num < len(sequences) and most_at_once is not None:
            outlook = look_ahead(state)
            num = num_fitting(candidates, num_certain, outlook, num_blocks, page_size, batch, most_at_once)
            state.onboard_batch = min(most_at_once, max(1, num))
        if num == 0 and not state.num_running:
            num = 1  # alone, each fits: the server has refused what does not
        num_admitted = _admit_described(state, candidates, num_certain, num)
        if num_admitted == num < len(sequences):
            return


def _admit_described(state: EngineState, candidates: Candidates, num_certain: int, num: int) -> int:
    """Admit the first `num` candidates, as long as they are what they were simulated to be. How many that was.

    One that was admitted before may have brought the prefix of another into the tree, or have had it evicted: then that
    one starts earlier, or later, than it was simulated to, and so do those behind it. Where all are certain to fit,
    they do so at any time.
    """
    tree, page_size = state.blocks.tree, state.options.limits.page_size
    for place in range(num):
        sequence = state.queues.take_first_waiting()
        family = candidates.families[place]
        if num > num_certain and place == candidates.family_starts[family]:
            most_blocks = (len(sequence.prompt) - 1) // page_size
            match = tree.match(sequence.prompt.token_bytes, sequence.salt, most_blocks)
            if match.num_blocks != candidates.num_cached_blocks[family]:
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
