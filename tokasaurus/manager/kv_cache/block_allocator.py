"""Allocates KV blocks, and keeps the blocks of cached prefixes until they are needed."""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.kv_cache.prefix_tree import PrefixTree
from tokasaurus.manager.kv_cache.prompt_logprobs import PromptLogprobStore
from tokasaurus.messages.forward import RoutedExperts


class BlockAllocator:
    """Allocates block ids 1..num_blocks, the most recently freed first: its memory may still be in a cache.

    Each block is either free, in the prefix tree, or owned by one sequence. Block 0 is padding and never allocated.
    """

    def __init__(self, num_blocks: int, page_size: int) -> None:
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
        self.prompt_logprobs: PromptLogprobStore | None = None
        """Prompt logprobs; None until a request asks for them."""
        self._free = np.arange(num_blocks, 0, -1, dtype=np.int32)  # a stack: its first num_free entries are free
        # Plain bytes: most calls free one block, for which a few calls of NumPy take ten times as long. Block 0 counts
        # as free: it must never be freed.
        self._is_free = bytearray(b"\x01") * (num_blocks + 1)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can return: free, or in the tree and used by no sequence."""
        return self.num_free + self.tree.num_unused_blocks

    @property
    def num_used(self) -> int:
        """Blocks used by sequences, whether owned or shared in the tree."""
        return self.num_blocks - self.num_available

    def allocate(self, num_blocks: int, step_id: int = 0) -> NDArray[np.int32]:
        """Block ids, int32 [num_blocks], owned by the caller. Evicts cached blocks if too few are free.

        step_id: the next step to be sent. Precondition: num_blocks <= num_available.
        """
        assert num_blocks <= self.num_available, f"{num_blocks} blocks asked, {self.num_available} available"
        num_kept = max(0, self.num_free - num_blocks)
        allocated: NDArray[np.int32] = self._free[num_kept : self.num_free][::-1].copy()
        is_free = self._is_free
        for block in allocated.tolist():
            is_free[block] = 0
        self.num_free = num_kept
        if len(allocated) < num_blocks:
            allocated = np.concatenate([allocated, self.tree.evict(num_blocks - len(allocated))])
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
        evicted = self.tree.evict(num_missing)
        # Below the free blocks, which are allocated first.
        self._free[num_missing:num_blocks] = self._free[: self.num_free].copy()
        self._free[:num_missing] = evicted[::-1]
        for block in evicted.tolist():
            self._is_free[block] = 1
        self.num_free = num_blocks

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
        is_free = self._is_free
        for block in blocks.tolist():
            assert not is_free[block], f"block {block} freed twice"
            is_free[block] = 1
        end = self.num_free + len(blocks)
        self._free[self.num_free : end] = blocks[::-1]
        self.num_free = end
