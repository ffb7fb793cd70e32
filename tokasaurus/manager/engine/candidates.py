"""What admission needs to know about waiting sequences: tokens, expected lengths and shared blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.kv_cache.prefix_tree import PrefixMatch, PrefixNode, PrefixTree
from tokasaurus.manager.kv_cache.prompt_logprobs import first_position, num_leading
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import Sequence

Int64Array = NDArray[np.int64]

FIRST_NODE_ALONE = -(1 << 30)
"""New nodes of prompts that share with no other candidate are numbered from here downwards, below all nodes of a
scratch tree."""


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
    """Prompt position where the first sample's prefill starts. The other samples start after the shared blocks."""
    num_cached_blocks: int
    """Blocks of the prompt in `match`, or in the prefix tree once the candidates before it are admitted."""
    path: list[tuple[int, int]]
    """(node, number of blocks used in it) for the whole prompt blocks that the samples share.

    An existing node of the tree is given by its index, a node that candidates will add by a negative number.
    """
    last_node: int | None
    """New node for the whole block that contains the prompt's last token; None if there is none.

    Only the first sample uses it: the last token is always computed, so its block is never shared.
    """


@dataclass(frozen=True, slots=True)
class Candidates:
    """K waiting sequences, in admission order."""

    num_prompt_tokens: Int64Array
    """[K] tokens to prefill, cached ones included."""
    num_to_compute: Int64Array
    """[K] prompt tokens to compute, at least 1."""
    decode_steps: Int64Array
    """[K] expected decode steps after the prefill."""
    sample_groups: list[SampleGroup]
    """The candidates grouped by prompt, in the same order."""


def describe(state: EngineState, sequences: list[Sequence]) -> Candidates:
    """What admission needs to know about the waiting `sequences`."""
    num_kept = np.array([len(sequence.kept_token_ids) for sequence in sequences])
    max_tokens = np.array([sequence.max_sampled_tokens for sequence in sequences])
    decode_steps = max_tokens - num_kept - 1
    if state.forecast is not None:
        ranks = state.num_admissions + np.arange(len(sequences))
        expected = state.forecast.expected(num_kept, max_tokens, ranks) - num_kept - 1
        decode_steps = np.where([sequence.may_stop for sequence in sequences], expected, decode_steps)
    num_prompt_tokens = np.array([len(sequence.prompt) for sequence in sequences])
    page_size = state.options.limits.page_size
    sample_groups = _group_by_prompt(state, sequences)
    first_positions = (num_prompt_tokens - 1) // page_size * page_size
    first_positions[[sample_group.start for sample_group in sample_groups]] = [
        sample_group.first_position for sample_group in sample_groups
    ]
    return Candidates(num_prompt_tokens, num_prompt_tokens - first_positions, decode_steps, sample_groups)


class _CachedPrompt(NamedTuple):
    first: int
    """Index of its first sample among the candidates."""
    whole_match: PrefixMatch
    match: PrefixMatch
    """Without the block that contains the prompt's last token."""
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
        whole_match = tree.match(token_bytes, sequence.salt, num_tokens // page_size)
        match = whole_match.first_blocks((num_tokens - 1) // page_size)
        start = match.num_blocks * block_bytes
        key = _branch(match, sequence.salt) + token_bytes[start : start + block_bytes]
        num_with_key[key] = num_with_key.get(key, 0) + 1
        prompts.append(_CachedPrompt(index, whole_match, match, key))
    is_alone = [num_with_key[key] == 1 and not sequences[index].needs_prompt_logprobs for index, _, _, key in prompts]
    others = [prompt for prompt, alone in zip(prompts, is_alone, strict=True) if not alone]
    shared = {group.start: group for group in _share(state, sequences, others)} if others else {}
    new_nodes = count(FIRST_NODE_ALONE, -1)
    sample_groups = []
    for (index, whole_match, match, _), alone in zip(prompts, is_alone, strict=True):
        if not alone:
            sample_groups.append(shared[index])
            continue
        num_tokens, num_cached = len(sequences[index].prompt.token_ids), match.num_blocks
        num_whole, num_shared = num_tokens // page_size, (num_tokens - 1) // page_size
        path = [(next(new_nodes), num_shared - num_cached)] if num_shared > num_cached else []
        last_node = next(new_nodes) if num_whole > num_shared and whole_match.num_blocks < num_whole else None
        path += _path_of_match(tree, match)
        sample_groups.append(SampleGroup(index, match, num_cached * page_size, num_cached, path, last_node))
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
    found: list[tuple[int, int, int, PrefixMatch, PrefixNode, int | None]] = []
    for index, whole_match, match, _ in prompts:
        sequence = sequences[index]
        prompt = sequence.prompt
        num_whole, num_shared = len(prompt) // page_size, (len(prompt) - 1) // page_size
        branch = _branch(match, sequence.salt)
        rest = prompt.token_bytes[match.num_blocks * block_bytes : num_shared * block_bytes]
        scratch_match = scratch_tree.match(rest, branch)
        node = scratch_tree.acquire(scratch_match)
        num_cached = match.num_blocks + scratch_match.num_blocks
        new = numbers[num_numbered : num_numbered + num_whole - num_cached]
        num_numbered += len(new)
        start = num_cached * page_size
        if sequence.needs_prompt_logprobs:
            cached = np.concatenate((tree.blocks_on_path(match), scratch_tree.blocks_on_path(scratch_match)))
            num_with_logprobs = _add_reservation(
                reserved_num_top, cached, new, sequence.request.num_top_prompt_logprobs
            )
            start = first_position(num_with_logprobs, page_size)
        num_new = num_shared - num_cached
        if num_new:
            node = scratch_tree.insert(node, rest[scratch_match.num_blocks * block_bytes :], new[:num_new], branch)
        last_node = None
        if num_whole > num_shared and whole_match.num_blocks < num_whole:
            last_bytes = prompt.token_bytes[num_shared * block_bytes : num_whole * block_bytes]
            last = scratch_tree.insert(node, last_bytes, new[num_new:], branch)
            last_node = None if last is node else -last.index
        found.append((index, start, num_cached, match, node, last_node))
    sample_groups = []
    for index, start, num_cached, match, node, last_node in found:
        path = [(-ancestor.index, len(ancestor.blocks)) for ancestor in _ancestors(scratch_tree, node)]
        path += _path_of_match(tree, match)
        sample_groups.append(SampleGroup(index, match, start, num_cached, path, last_node))
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
