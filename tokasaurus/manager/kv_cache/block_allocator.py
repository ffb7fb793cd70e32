"""Which KV blocks are free, which a sequence owns or shares, and which are kept in case a prefix comes again."""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.kv_cache.prefix_tree import PrefixTree
from tokasaurus.manager.kv_cache.prompt_logprobs import PromptScores


class BlockAllocator:
    """Ids 1..num_blocks, the most recently freed first: its memory is the likeliest to be in a cache still.

    A block is free, or in the tree, or owned by one sequence alone. Block 0 is padding and never given.

    tokens: int32 [num_blocks + 1, page_size], the token at each place of a block, written by the owner of the block;
    row 0 is scratch.
    is_computed: bool [num_blocks + 1], whether steps that fill the whole block are sent, written by the owner; False
    when the block is given.
    scores: of the tokens of prompts; None until some are asked for.
    """

    def __init__(self, num_blocks: int, page_size: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.tree = PrefixTree(page_size)
        self.tokens = np.zeros((num_blocks + 1, page_size), np.int32)
        self.is_computed = np.zeros(num_blocks + 1, np.bool_)
        self.scores: PromptScores | None = None
        self._free = np.arange(num_blocks, 0, -1, dtype=np.int32)  # a stack: those that are free come first
        # -1 where not free, else its place among those that were freed with it, so that one of them freed twice shows.
        # Block 0 counts as free: nobody may give it back.
        self._freed_as = np.zeros(num_blocks + 1, np.int32)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: free, or in the tree with no sequence that uses them."""
        return self.num_free + self.tree.num_unused_blocks

    @property
    def num_used(self) -> int:
        """Blocks of sequences, their own and those they share in the tree."""
        return self.num_blocks - self.num_available

    def allocate(self, num_blocks: int) -> NDArray[np.int32]:
        """int32 [num_blocks], owned by the caller; cached blocks are evicted where the free ones are too few.

        Whoever takes has made sure that they are there.
        """
        assert num_blocks <= self.num_available, f"{num_blocks} blocks asked, {self.num_available} available"
        num_kept = max(0, self.num_free - num_blocks)
        taken: NDArray[np.int32] = self._free[num_kept : self.num_free][::-1].copy()
        self._freed_as[taken] = -1
        self.num_free = num_kept
        if len(taken) < num_blocks:
            taken = np.concatenate([taken, self.tree.evict(num_blocks - len(taken))])
        self.is_computed[taken] = False
        if self.scores is not None:
            self.scores.forget(taken)
        return taken

    def keep_scores(self, num_top: int) -> None:
        """Scores will be asked for, with so many likeliest tokens at each place."""
        if self.scores is None:
            self.scores = PromptScores(self.num_blocks, self.tokens.shape[1])
        self.scores.widen(num_top)

    def free(self, blocks: NDArray[np.int32]) -> None:
        """Each of `blocks` is free again at once: the device executes in order, so a step that was sent before this
        cannot touch what a later step writes there. They are not in the tree."""
        freed_as = self._freed_as
        twice = blocks[freed_as[blocks] >= 0]
        assert not len(twice), f"block {twice[0]} freed twice"
        places = np.arange(len(blocks), dtype=np.int32)
        freed_as[blocks] = places
        twice = blocks[freed_as[blocks] != places]
        assert not len(twice), f"block {twice[0]} freed twice"
        end = self.num_free + len(blocks)
        self._free[self.num_free : end] = blocks[::-1]
        self.num_free = end
