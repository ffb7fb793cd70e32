"""Prefix tree: a radix tree of whole KV blocks, keyed by their tokens and shared by sequences with a common prefix.

A sequence references one node and thereby uses the path from the root to it. Nodes that no sequence uses stay until
their blocks are needed. A parent is used whenever a child is, so all unused blocks can be evicted leaf by leaf.
Steps in flight of sequences that have ended count as no use: see `BlockAllocator.free`.
"""

import heapq
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BYTES_PER_TOKEN = 4

ROOT_SEQUENCES = 1 << 30
"""Reference count of the root, above any other node's: the root counts as shared and is never an unused leaf."""

MIN_SIZE = 1024
"""The arrays of nodes do not shrink below this size."""


class PrefixNode:
    """One or more whole blocks that follow the parent's; only the root has none. Only the tree changes a node.

    B blocks of page_size tokens.
    """

    __slots__ = ("blocks", "children", "end_block", "index", "key", "last_used", "num_sequences", "parent", "tokens")

    def __init__(
        self, parent: "PrefixNode | None", key: bytes, tokens: bytes, blocks: NDArray[np.int32], num_sequences: int
    ) -> None:
        self.index = 0
        """Index in the tree's arrays; -1 once the node is removed, and the index may be reused."""
        self.parent: PrefixNode = self if parent is None else parent
        self.key = key
        """Key in the parent's `children`: bytes of its first block, preceded by the salt if the parent is the root."""
        self.children: dict[bytes, PrefixNode] = {}
        self.tokens = tokens
        """Bytes of int32 [B * page_size]."""
        self.blocks = blocks
        """int32 [B], never changed in place."""
        self.end_block: int = len(blocks) if parent is None else parent.end_block + len(blocks)
        """Blocks from the root to the end of this node."""
        self.num_sequences = num_sequences
        """Reference count: sequences whose path includes this node."""
        self.last_used = 0
        """Tick at which `num_sequences` last fell to 0."""


class PrefixMatch(NamedTuple):
    """The first `num_blocks` blocks on the path from the root to `node`, the last of them in `node`.

    Valid until one of these blocks is evicted or trimmed; it stays valid when nodes are split.
    """

    node: PrefixNode
    num_blocks: int

    def first_blocks(self, num_blocks: int) -> "PrefixMatch":
        """The match of the same tokens, but of at most `num_blocks` blocks."""
        num_blocks, node = min(num_blocks, self.num_blocks), self.node
        while num_blocks <= node.parent.end_block and node.parent is not node:
            node = node.parent
        return PrefixMatch(node, num_blocks)


class PrefixTree:
    """The tree, and per-node arrays for KV simulations."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._block_bytes = page_size * BYTES_PER_TOKEN
        self.root = PrefixNode(None, b"", b"", np.empty(0, np.int32), ROOT_SEQUENCES)
        self.num_blocks = 0
        """Blocks in the tree."""
        self.num_unused_blocks = 0
        """Blocks of nodes that no sequence uses."""
        self.num_evicted_blocks = 0
        """Blocks that `evict` has removed since the start."""
        self.arrays = NodeArrays(ROOT_SEQUENCES)
        self._tick = 0
        # Heap of (last_used, entry number, node); an entry is valid while its node is an unused leaf since that tick.
        self._unused_leaves: list[tuple[int, int, PrefixNode]] = []
        self._entry_numbers = count()

    @property
    def tick(self) -> int:
        """How often sequences have released nodes."""
        return self._tick

    @property
    def oldest_unused(self) -> int | None:
        """The tick at which the blocks that are evicted first were used last; None: there are no such blocks."""
        while self._unused_leaves:
            last_used, _, node = self._unused_leaves[0]
            if self._is_unused_leaf(node, last_used):
                return last_used
            heapq.heappop(self._unused_leaves)
        return None

    def match(
        self, tokens: bytes, salt: bytes = b"", max_blocks: int | None = None, start: PrefixNode | None = None
    ) -> PrefixMatch:
        """The longest prefix of whole blocks in the tree. Does not change the tree.

        tokens: int32 as bytes, the tokens after the end of `start` (the root if None).
        salt: separates caches; used only if `start` is the root.
        max_blocks: most blocks of the match, counted from the root like its `num_blocks`.
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
        """Block ids from the root on, int32 [match.num_blocks]; a copy."""
        parts = []
        node = match.node
        while node is not self.root:
            parts.append(node.blocks)
            node = node.parent
        parts.reverse()
        return np.concatenate(parts)[: match.num_blocks] if parts else np.empty(0, np.int32)

    def acquire(self, match: PrefixMatch, current: PrefixNode | None = None) -> PrefixNode:
        """Reference a match for a sequence; the returned node is to be passed to `release`.

        current: the node that the sequence references already, on the path of the match; the returned node replaces it.
        """
        node = match.first_blocks(match.num_blocks).node  # may have been split since the match was made
        assert node.index >= 0, "the match is no longer in the tree"
        assert match.num_blocks <= node.end_block, "the end of the match is no longer in the tree"
        if match.num_blocks < node.end_block:
            node = self._split(node, match.num_blocks - node.parent.end_block)
        above = self.root if current is None else current
        deepest = node
        while node is not above:
            assert node is not self.root, "the current node is not on the path of the match"
            if node.num_sequences == 0:
                self.num_unused_blocks -= len(node.blocks)
            node.num_sequences += 1
            self.arrays.num_sequences[node.index] = node.num_sequences
            node = node.parent
        return deepest

    def _split(self, node: PrefixNode, num_blocks: int) -> PrefixNode:
        """Move the first `num_blocks` blocks of `node` to a new node, its new parent; return that parent.

        `node` stays the lower part, because sequences that reference it must keep the same end.
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
        self.arrays.parents[node.index] = upper.index
        return upper

    def insert(self, node: PrefixNode, tokens: bytes, blocks: NDArray[np.int32], salt: bytes = b"") -> PrefixNode:
        """Add `blocks`, at least one, as a child of the node that a sequence references; the child replaces that node.

        Returns the child. If a child begins with the same block already, changes nothing and returns `node`; the caller
        keeps the blocks. tokens: int32 as bytes, exactly those of `blocks`. salt: used only if `node` is the root.
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
        """Drop one sequence's reference to `node` and all its ancestors."""
        self._tick += 1
        if node.num_sequences == 1 and not node.children:
            self._push_unused_leaf(node, self._tick)
        while node is not self.root:
            assert node.num_sequences > 0, "node released more often than acquired"
            node.num_sequences -= 1
            self.arrays.num_sequences[node.index] = node.num_sequences
            if node.num_sequences == 0:
                node.last_used = self._tick
                self.num_unused_blocks += len(node.blocks)
            node = node.parent

    def evict(self, num_blocks: int) -> NDArray[np.int32]:
        """Remove and return `num_blocks` unused blocks, int32 [num_blocks]. Precondition: at least as many are unused.

        Each block is removed from the tail of the least recently used unused leaf. A parent that becomes a leaf keeps
        its own `last_used`.
        """
        assert num_blocks <= self.num_unused_blocks, f"{num_blocks} blocks asked, {self.num_unused_blocks} unused"
        self.num_evicted_blocks += num_blocks
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
        """Remove and return blocks that will never be computed, int32. Call when a sequence has released `node` before
        the end of its prefill.

        Uncomputed blocks are removed from the tail of `node` while it is an unused leaf, then, if none is left, from
        its parent. is_computed: bool, by block id.
        """
        parts = [np.empty(0, np.int32)]
        while node.num_sequences == 0 and not node.children:
            computed = np.flatnonzero(is_computed[node.blocks])
            num_kept = int(computed[-1]) + 1 if len(computed) else 0
            parts.append(self._shorten(node, num_kept))
            node = node.parent  # not a leaf, unless nothing was kept
        return np.concatenate(parts)

    def discard(self, block: int) -> NDArray[np.int32]:
        """Remove `block` and all blocks after it, and return them, int32; none if it is not in the tree.

        Reads the whole tree. Precondition: no sequence uses the block.
        """
        nodes = list(self.root.children.values())
        for node in nodes:  # grows while it is read: parents before children
            nodes += node.children.values()
        found = next((node for node in nodes if block in node.blocks), None)
        if found is None:
            return np.empty(0, np.int32)
        assert found.num_sequences == 0, "a sequence uses the block"
        below = [found]
        for node in below:
            below += node.children.values()
        removed = [self._shorten(node, 0) for node in below[:0:-1]]
        kept = int(np.flatnonzero(found.blocks == block)[0])
        return np.concatenate([*removed, self._shorten(found, kept)])

    def _is_unused_leaf(self, node: PrefixNode, since: int) -> bool:
        return node.last_used == since and node.num_sequences == 0 and not node.children and node.index >= 0

    def _shorten(self, node: PrefixNode, num_kept: int) -> NDArray[np.int32]:
        """Keep the first `num_kept` blocks of an unused leaf and return the others; 0 removes the leaf."""
        removed = node.blocks[num_kept:]
        self.num_blocks -= len(removed)
        self.num_unused_blocks -= len(removed)
        if num_kept:
            node.blocks = node.blocks[:num_kept]
            node.tokens = node.tokens[: num_kept * self._block_bytes]
            node.end_block -= len(removed)
            self.arrays.end_blocks[node.index] = node.end_block
            return removed
        parent = node.parent
        del parent.children[node.key]
        self.arrays.remove(node.index)
        node.index = -1
        if parent.num_sequences == 0 and not parent.children:
            self._push_unused_leaf(parent, parent.last_used)
        return removed

    def _push_unused_leaf(self, node: PrefixNode, last_used: int) -> None:
        """Add an unused leaf to the eviction heap."""
        # Every release of the same prefix leaves an entry, which eviction may never reach.
        if len(self._unused_leaves) > 2 * len(self.arrays.parents):
            self._unused_leaves = [entry for entry in self._unused_leaves if self._is_unused_leaf(entry[2], entry[0])]
            heapq.heapify(self._unused_leaves)
        heapq.heappush(self._unused_leaves, (last_used, next(self._entry_numbers), node))

    def _add(self, node: PrefixNode) -> None:
        """Register a new node with its parent and in the arrays."""
        node.index = self.arrays.add(node.parent.index, node.end_block, node.num_sequences)
        node.parent.children[node.key] = node


class NodeArrays:
    """Gives each node an index. Index 0 is the root's, its own parent.

    The arrays are replaced when they grow or shrink, and entries at unused indices are meaningless. A new node takes
    the lowest free index, so once most nodes are gone, the last ones in the upper half give way to others in the lower
    half sooner or later, and the upper half is given up.
    """

    def __init__(self, root_sequences: int) -> None:
        """root_sequences: the root's reference count."""
        self.parents: NDArray[np.int32] = np.zeros(1, np.int32)
        """Index of each node's parent."""
        self.end_blocks: NDArray[np.int32] = np.zeros(1, np.int32)
        """Blocks from the root to the end of each node."""
        self.num_sequences: NDArray[np.int32] = np.full(1, root_sequences, np.int32)
        """Each node's reference count."""
        self._is_used = np.ones(1, np.bool_)
        self._num_nodes = 1
        self._num_in_upper_half = 0
        """Nodes whose index is in the upper half of the arrays."""
        self._free: list[int] = []
        """A heap of free indices. Those beyond the arrays stay in it when they shrink."""

    def add(self, parent: int, end_block: int, num_sequences: int) -> int:
        """Return the index of a new node. parent: its parent's index."""
        size = len(self.parents)
        if not self._free or self._free[0] >= size:
            self._free = list(range(size, 2 * size))
            size *= 2
            self._resize(size)
        index = heapq.heappop(self._free)
        self._num_nodes += 1
        self._num_in_upper_half += 2 * index >= size
        self._is_used[index] = True
        self.parents[index] = parent
        self.end_blocks[index] = end_block
        self.num_sequences[index] = num_sequences
        return index

    def remove(self, index: int) -> None:
        """Free the index of a node that is no longer in the tree."""
        size = len(self.parents)
        heapq.heappush(self._free, index)
        self._is_used[index] = False
        self._num_nodes -= 1
        self._num_in_upper_half -= 2 * index >= size
        while not self._num_in_upper_half and size > max(MIN_SIZE, 4 * self._num_nodes):
            size //= 2
            self._resize(size)

    def _resize(self, size: int) -> None:
        self.parents = _resized(self.parents, size)
        self.end_blocks = _resized(self.end_blocks, size)
        self.num_sequences = _resized(self.num_sequences, size)
        self._is_used = _resized(self._is_used, size)
        self._num_in_upper_half = int(self._is_used[size // 2 :].sum())


def _resized(array: NDArray[Any], size: int) -> NDArray[Any]:
    resized = np.zeros(size, array.dtype)
    resized[: len(array)] = array[:size]
    return resized
