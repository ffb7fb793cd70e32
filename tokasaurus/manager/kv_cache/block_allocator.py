"""Allocates KV blocks, and keeps the blocks of cached prefixes until they are needed."""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.kv_cache.prefix_tree import PrefixTree
from tokasaurus.manager.kv_cache.prompt_logprobs import PromptLogprobStore
from tokasaurus.manager.kv_cache.snapshots import Snapshots
from tokasaurus.manager.kv_cache.window_blocks import WindowSets
from tokasaurus.messages.forward import RoutedExperts
from tokasaurus.messages.status import WindowGroups

SNAPSHOT_INTERVAL = 4096
"""Tokens between snapshots of a long prompt's states."""


class BlockAllocator:
    """Allocates block ids 1..num_blocks, the most recently freed first: its memory may still be in a cache.

    Each block is either free, in the prefix tree, owned by one sequence, or in a set of `windows`. Block 0 is padding
    and never allocated.
    """

    def __init__(
        self, num_blocks: int, page_size: int, windows: WindowGroups | None = None, num_snapshots: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.tree = PrefixTree(page_size)
        self.tokens = np.zeros((num_blocks + 1, page_size), np.int32)
        """[num_blocks + 1, page_size], the tokens in each block, written by the block's owner; row 0 is scratch."""
        self.is_computed = np.zeros(num_blocks + 1, np.bool_)
        """[num_blocks + 1], whether steps that fill the whole block are sent, written by the block's owner; False when
        the block is allocated."""
        self.sampled_logprobs: NDArray[np.float32] | None = None
        """[num_blocks + 1, page_size], the logprob of each sampled token in `tokens`; None until requested."""
        self.experts: RoutedExperts | None = None
        """[num_blocks + 1, page_size, layers, K], of each token in `tokens` that was computed for a request that wants
        experts; None until the first."""
        self.allocated_in = np.zeros(num_blocks + 1, np.int64)
        """[num_blocks + 1], the first step that could use each block since it was allocated last."""
        self.windows = None if windows is None else WindowSets(windows, num_blocks, page_size)
        """Of layers with windows; None: they keep all tokens, as the other layers do."""
        assert windows is None or not num_snapshots, "beside states, layers with windows keep all tokens"
        self.snapshots = None
        """Of layers with states; None: there are no such layers."""
        if num_snapshots:
            self.snapshots = Snapshots(num_snapshots, num_blocks, page_size, SNAPSHOT_INTERVAL)
        self.prompt_logprobs: PromptLogprobStore | None = None
        """Prompt logprobs; None until a request asks for them."""
        self._free = np.arange(num_blocks, 0, -1, dtype=np.int32)  # a stack: its first num_free entries are free
        # Plain bytes: most calls free one block, for which a few calls of NumPy take ten times as long. Block 0 counts
        # as free: it must never be freed.
        self._is_free = bytearray(b"\x01") * (num_blocks + 1)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can return: free, or cached and used by no sequence."""
        num_unheld = 0 if self.windows is None else self.windows.num_unheld_blocks
        return self.num_free + self.tree.num_unused_blocks + num_unheld

    @property
    def num_used(self) -> int:
        """Blocks used by sequences, whether owned or shared in the tree."""
        return self.num_blocks - self.num_available

    @property
    def num_held_by_windows(self) -> int:
        """The part of num_used in which layers with windows keep tokens."""
        return 0 if self.windows is None else self.windows.groups.num_groups * self.windows.num_held

    def allocate(self, num_blocks: int, step_id: int = 0) -> NDArray[np.int32]:
        """Block ids, int32 [num_blocks], owned by the caller. Evicts cached blocks if too few are free.

        step_id: the next step to be sent. Precondition: num_blocks <= num_available.
        """
        assert num_blocks <= self.num_available, f"{num_blocks} blocks asked, {self.num_available} available"
        if self.windows is not None:
            self.evict_for(num_blocks)
        num_kept = max(0, self.num_free - num_blocks)
        allocated: NDArray[np.int32] = self._free[num_kept : self.num_free][::-1].copy()
        is_free = self._is_free
        for block in allocated.tolist():
            is_free[block] = 0
        self.num_free = num_kept
        if len(allocated) < num_blocks:
            evicted = self.tree.evict(num_blocks - len(allocated))
            if self.snapshots is not None:
                self.snapshots.forget(evicted)
            allocated = np.concatenate([allocated, evicted])
        self.is_computed[allocated] = False
        self.allocated_in[allocated] = step_id
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.forget(allocated)
        return allocated

    def evict_for(self, num_blocks: int) -> None:
        """Evict in one go what several calls of `allocate` would evict for `num_blocks` blocks together.

        Precondition: num_blocks <= num_available.
        """
        num_missing = num_blocks - self.num_free
        if num_missing <= 0:
            return
        assert num_blocks <= self.num_available, f"{num_blocks} blocks asked, {self.num_available} available"
        if self.windows is not None:
            self._evict_oldest(self.windows, num_blocks)
            return
        evicted = self.tree.evict(num_missing)
        if self.snapshots is not None:
            self.snapshots.forget(evicted)
        # Below the free blocks, which are allocated first.
        self._free[num_missing:num_blocks] = self._free[: self.num_free].copy()
        self._free[:num_missing] = evicted[::-1]
        for block in evicted.tolist():
            self._is_free[block] = 1
        self.num_free = num_blocks

    def _evict_oldest(self, windows: WindowSets, num_blocks: int) -> None:
        """Evict until `num_blocks` are free: sets and leaves of the tree, by when they were used last."""
        tree = self.tree
        while (num_missing := num_blocks - self.num_free) > 0:
            oldest, oldest_leaf = windows.oldest, tree.oldest_unused
            # A sequence drops its sets just before it releases its node: its blocks go first, with their sets.
            if oldest is not None and (oldest_leaf is None or oldest + 1 < oldest_leaf):
                self._push(windows.evict())
            else:
                # Their sets become free too.
                num_evicted = max(1, num_missing // (1 + windows.groups.num_groups))
                self.free(tree.evict(min(num_evicted, tree.num_unused_blocks)))

    def drop_windows(self, blocks: NDArray[np.int32]) -> None:
        """Sequences no longer need what layers with windows keep of these blocks of tokens, each as often as listed.
        The memory can be allocated at once, as that of `free`."""
        assert self.windows is not None
        self._push(self.windows.drop(blocks, self.tree.tick))

    def add_windows(self, blocks: NDArray[np.int32], step_id: int) -> None:
        """Give layers with windows blocks for these held blocks of tokens, where they have none."""
        assert self.windows is not None
        blocks = blocks[~self.windows.are_there(blocks)]
        if len(blocks):
            self.windows.add(blocks, self.allocate(len(blocks) * self.windows.groups.num_groups, step_id))

    def start(self, cached: NDArray[np.int32], start: int) -> int:
        """The last position, at most `start`, from which a prompt can be computed: what its layers with windows see and
        their states are there, or will be. cached: its first blocks, at least start // page_size of them."""
        if self.windows is not None:
            return self.windows.start(cached, start)
        return start if self.snapshots is None else self.snapshots.start(cached, start)

    def keep_prompt_logprobs(self, num_top: int) -> None:
        """Prepare to store prompt logprobs, with `num_top` top-k logprobs per token."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = PromptLogprobStore(self.num_blocks, self.tokens.shape[1])
        self.prompt_logprobs.widen(num_top)

    def note_experts(self, kv_indices: NDArray[np.int64], experts: RoutedExperts) -> None:
        """Store the experts of A tokens. kv_indices: [A], block * page_size + offset. experts: [A, layers, K]."""
        if self.experts is None:  # the system provides the memory when it is first written
            self.experts = np.zeros((*self.tokens.shape, *experts.shape[1:]), experts.dtype)
        self.experts.reshape(-1, *experts.shape[1:])[kv_indices] = experts

    def free(self, blocks: NDArray[np.int32]) -> None:
        """Free `blocks`, none of which is in the tree. They can be allocated at once: the device executes in order, so
        a step sent earlier cannot touch what a later step writes there."""
        self._push(blocks)
        if self.windows is not None:
            self._push(self.windows.forget(blocks))
        if self.snapshots is not None:
            self.snapshots.forget(blocks)

    def _push(self, blocks: NDArray[np.int32]) -> None:
        is_free = self._is_free
        for block in blocks.tolist():
            assert not is_free[block], f"block {block} freed twice"
            is_free[block] = 1
        end = self.num_free + len(blocks)
        self._free[self.num_free : end] = blocks[::-1]
        self.num_free = end
