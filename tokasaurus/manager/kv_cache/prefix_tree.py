"""Which tokens' KV is in which blocks: a radix tree of whole blocks, shared by sequences that begin alike.

A sequence uses the path from the root to one node, which it holds. Nodes that no sequence uses stay until their blocks
are needed. A parent is used whenever a child is, so all unused blocks can be had back, leaf by leaf.
"""

import heapq
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

BYTES_PER_TOKEN = 4
ROOT_SEQUENCES = 1 << 30
"""More than any node below: the root counts as shared by all, and is never an unused leaf."""


class PrefixNode:
    """Some whole blocks that follow the parent's. Only the tree writes here; B blocks of page_size tokens.

    index: its place in the tree's arrays, given to another node after this one's end; -1 then.
    key: under which the parent knows it: the bytes of its first block, after the salt if the parent is the root.
    tokens: bytes of int32 [B * page_size]. blocks: int32 [B], never written in place. B >= 1 but at the root.
    end_block: blocks from the root to its end.
    num_sequences: sequences whose path leads through it. last_used: the tick at which that number last fell to 0.
    """

    __slots__ = ("blocks", "children", "end_block", "index", "key", "last_used", "num_sequences", "parent", "tokens")

    def __init__(
        self, parent: "PrefixNode | None", key: bytes, tokens: bytes, blocks: NDArray[np.int32], num_sequences: int
    ) -> None:
        self.index = 0
        self.parent: PrefixNode = self if parent is None else parent
        self.key = key
        self.children: dict[bytes, PrefixNode] = {}
        self.tokens = tokens
        self.blocks = blocks
        self.end_block: int = len(blocks) if parent is None else parent.end_block + len(blocks)
        self.num_sequences = num_sequences
        self.last_used = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The first `num_blocks` blocks on the path from the root to `node`, the last of them in `node`.

    Right until a block of it is evicted or trimmed; other sequences may split its nodes meanwhile.
    """

    node: PrefixNode
    num_blocks: int


class PrefixTree:
    """The tree, with what a simulation needs of each node in arrays.

    num_blocks: in the tree. num_unused_blocks: those of nodes with no sequence.
    parents, end_blocks, num_sequences: int32 by node index, the root first and its own parent. The arrays are replaced
    when they grow, and mean nothing at indices of no node.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._block_bytes = page_size * BYTES_PER_TOKEN
        self.root = PrefixNode(None, b"", b"", np.empty(0, np.int32), ROOT_SEQUENCES)
        self.num_blocks = 0
        self.num_unused_blocks = 0
        self.parents = np.zeros(1, np.int32)
        self.end_blocks = np.zeros(1, np.int32)
        self.num_sequences = np.full(1, ROOT_SEQUENCES, np.int32)
        self._free_indices: list[int] = []
        self._tick = 0
        # (last_used, order of entry, node): an entry counts only while its node is an unused leaf since that tick.
        self._unused_leaves: list[tuple[int, int, PrefixNode]] = []
        self._entry_numbers = count()

    def match(
        self, tokens: bytes, salt: bytes = b"", max_blocks: int | None = None, start: PrefixNode | None = None
    ) -> PrefixMatch:
        """The longest prefix of whole blocks that is in the tree. Changes nothing.

        tokens: int32 as bytes, those that follow the end of `start` (the root if None).
        salt: separates caches; it has a meaning only where `start` is the root.
        max_blocks: of the match, counted from the root like its `num_blocks`.
        """
        block_bytes = self._block_bytes
        node = self.root if start is None else start
        end = len(tokens) // block_bytes
        if max_blocks is not None:
            end = min(end, max_blocks - node.end_block)
        end *= block_bytes
        position = 0
        if node is not self.root:
            salt = b""
        while position < end:
            child = node.children.get(salt + tokens[position : position + block_bytes])
            if child is None:
                break
            salt = b""
            child_end = position + len(child.tokens)
            if child_end > end or not tokens.startswith(child.tokens, position):
                num_common = self._num_common_blocks(child.tokens, tokens[position:end])
                return PrefixMatch(child, node.end_block + num_common)
            node = child
            position = child_end
        return PrefixMatch(node, node.end_block)

    def _num_common_blocks(self, tokens: bytes, others: bytes) -> int:
        num_tokens = min(len(tokens), len(others)) // BYTES_PER_TOKEN
        differ = np.frombuffer(tokens, np.int32, num_tokens) != np.frombuffer(others, np.int32, num_tokens)
        first = int(differ.argmax())
        return (first if differ[first] else num_tokens) // self._page_size

    def blocks_on_path(self, match: PrefixMatch) -> NDArray[np.int32]:
        """int32 [match.num_blocks], from the root on; the caller's own copy."""
        parts = []
        node = match.node
        while node is not self.root:
            parts.append(node.blocks)
            node = node.parent
        parts.reverse()
        return np.concatenate(parts)[: match.num_blocks] if parts else np.empty(0, np.int32)

    def acquire(self, match: PrefixMatch, held: PrefixNode | None = None) -> PrefixNode:
        """A sequence uses the match from now on; the node returned is what it holds, and gives to `release`.

        held: what it holds already, a node on the path of the match; it holds the returned one instead.
        """
        node = match.node
        while match.num_blocks <= node.parent.end_block and node is not self.root:
            node = node.parent  # split since the match
        assert node.index >= 0, "the match is no longer in the tree"
        assert match.num_blocks <= node.end_block, "the end of the match is no longer in the tree"
        if match.num_blocks < node.end_block:
            node = self._split(node, match.num_blocks - node.parent.end_block)
        above = self.root if held is None else held
        deepest = node
        while node is not above:
            assert node is not self.root, "what the sequence holds is not on the path"
            if node.num_sequences == 0:
                self.num_unused_blocks -= len(node.blocks)
            node.num_sequences += 1
            self.num_sequences[node.index] = node.num_sequences
            node = node.parent
        return deepest

    def _split(self, node: PrefixNode, num_blocks: int) -> PrefixNode:
        """Make the first `num_blocks` of the node a node of their own, its new parent.

        The object stays the lower part, for what sequences hold must still end where it did.
        """
        cut = num_blocks * self._block_bytes
        upper = PrefixNode(node.parent, node.key, node.tokens[:cut], node.blocks[:num_blocks], node.num_sequences)
        upper.last_used = node.last_used
        self._add(upper)
        node.tokens = node.tokens[cut:]
        node.blocks = node.blocks[num_blocks:]
        node.key = node.tokens[: self._block_bytes]
        node.parent = upper
        upper.children[node.key] = node
        self.parents[node.index] = upper.index
        return upper

    def insert(self, node: PrefixNode, tokens: bytes, blocks: NDArray[np.int32], salt: bytes = b"") -> PrefixNode:
        """A sequence that holds `node` puts its next blocks, at least one, below it and holds the new child instead.

        Where a child begins with the same block, nothing is put in, `node` is returned, and the blocks stay the
        caller's. tokens: int32 as bytes, of `blocks` exactly. salt: matters only if `node` is the root.
        """
        assert 0 < len(tokens) == len(blocks) * self._block_bytes, "not whole blocks"
        key = tokens[: self._block_bytes]
        if node is self.root:
            key = salt + key
        if key in node.children:
            return node
        child = PrefixNode(node, key, tokens, np.array(blocks, np.int32), 1)
        self._add(child)
        self.num_blocks += len(child.blocks)
        return child

    def release(self, node: PrefixNode) -> None:
        """The sequence that holds `node` uses it no more, nor anything above it."""
        self._tick += 1
        if node.num_sequences == 1 and not node.children:
            self._offer(node, self._tick)
        while node is not self.root:
            assert node.num_sequences > 0, "released more often than held"
            node.num_sequences -= 1
            self.num_sequences[node.index] = node.num_sequences
            if node.num_sequences == 0:
                node.last_used = self._tick
                self.num_unused_blocks += len(node.blocks)
            node = node.parent

    def evict(self, num_blocks: int) -> NDArray[np.int32]:
        """Remove `num_blocks` unused blocks, which must be there; int32 [num_blocks].

        Each from the tail of the unused leaf that was used least recently. A parent that becomes a leaf by this is as
        old as it was.
        """
        assert num_blocks <= self.num_unused_blocks, f"{num_blocks} blocks asked, {self.num_unused_blocks} unused"
        parts = [np.empty(0, np.int32)]
        while num_blocks > 0:
            last_used, _, node = self._unused_leaves[0]
            if not self._is_unused_leaf(node, last_used):
                heapq.heappop(self._unused_leaves)
                continue
            num_kept = max(0, len(node.blocks) - num_blocks)
            if num_kept == 0:
                heapq.heappop(self._unused_leaves)
            parts.append(self._shorten(node, num_kept))
            num_blocks -= len(parts[-1])
        return np.concatenate(parts)

    def trim(self, node: PrefixNode, is_computed: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Remove the blocks that nobody will compute, now that a sequence has released `node` before its prefill ended.

        While `node` is an unused leaf, those at its tail are removed; if none is left, so with its parent.
        is_computed: by block id. Gives the removed blocks, int32.
        """
        parts = [np.empty(0, np.int32)]
        while node.num_sequences == 0 and not node.children:
            computed = np.flatnonzero(is_computed[node.blocks])
            num_kept = int(computed[-1]) + 1 if len(computed) else 0
            parts.append(self._shorten(node, num_kept))
            node = node.parent  # no leaf, unless nothing was kept
        return np.concatenate(parts)

    def _is_unused_leaf(self, node: PrefixNode, since: int) -> bool:
        return node.last_used == since and node.num_sequences == 0 and not node.children and node.index >= 0

    def _shorten(self, node: PrefixNode, num_kept: int) -> NDArray[np.int32]:
        """Keep the first `num_kept` blocks of an unused leaf, nothing of it if 0. The blocks removed."""
        removed = node.blocks[num_kept:]
        self.num_blocks -= len(removed)
        self.num_unused_blocks -= len(removed)
        if num_kept:
            node.blocks = node.blocks[:num_kept]
            node.tokens = node.tokens[: num_kept * self._block_bytes]
            node.end_block -= len(removed)
            self.end_blocks[node.index] = node.end_block
            return removed
        parent = node.parent
        del parent.children[node.key]
        self._free_indices.append(node.index)
        node.index = -1
        if parent.num_sequences == 0 and not parent.children:
            self._offer(parent, parent.last_used)
        return removed

    def _offer(self, node: PrefixNode, last_used: int) -> None:
        """Let an unused leaf be evicted in its turn."""
        # A prefix that is used and released again and again leaves an entry each time, which eviction may never reach.
        if len(self._unused_leaves) > 2 * len(self.parents):
            self._unused_leaves = [entry for entry in self._unused_leaves if self._is_unused_leaf(entry[2], entry[0])]
            heapq.heapify(self._unused_leaves)
        heapq.heappush(self._unused_leaves, (last_used, next(self._entry_numbers), node))

    def _add(self, node: PrefixNode) -> None:
        """Let the parent and the arrays know a new node."""
        if not self._free_indices:
            self._grow()
        node.index = index = self._free_indices.pop()
        node.parent.children[node.key] = node
        self.parents[index] = node.parent.index
        self.end_blocks[index] = node.end_block
        self.num_sequences[index] = node.num_sequences

    def _grow(self) -> None:
        size = len(self.parents)
        empty = np.zeros(size, np.int32)
        self.parents = np.concatenate([self.parents, empty])
        self.end_blocks = np.concatenate([self.end_blocks, empty])
        self.num_sequences = np.concatenate([self.num_sequences, empty])
        self._free_indices.extend(range(2 * size - 1, size - 1, -1))
