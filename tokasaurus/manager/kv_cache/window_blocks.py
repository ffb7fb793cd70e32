"""Which blocks layers with windows have for the tokens of each block, and when they are given back.

A block of tokens is known by its block of the block tables, where layers that see all tokens keep keys and values.
Layers with windows have blocks of their own for the same tokens, one for each of their groups: a set. A running
sequence holds the sets of the tokens that its next steps see or compute. A set that nobody holds is free again, unless
prompts to come may need it: those of the last window of a prompt or of a sequence stay until their memory is needed.
"""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.forward import WindowBlocks
from tokasaurus.messages.status import WindowGroups

_NO_BLOCKS = np.zeros(0, np.int32)


class WindowSets:
    """The set of every block of tokens, by its block id. B blocks of tokens, G groups."""

    def __init__(self, groups: WindowGroups, num_blocks: int, page_size: int) -> None:
        self.groups = groups
        self._page_size = page_size
        self._sets = np.zeros((num_blocks + 1, groups.num_groups), np.int32)
        """[blocks + 1, G]; 0: there is none."""
        self.num_holders = np.zeros(num_blocks + 1, np.int32)
        """[blocks + 1], sequences that hold the set, which may not be there yet."""
        self.is_whole = np.zeros(num_blocks + 1, np.bool_)
        """[blocks + 1], whether steps that fill the whole set are sent."""
        self.is_promised = np.zeros(num_blocks + 1, np.bool_)
        """[blocks + 1], whether a sequence in prefill will compute it."""
        self.is_wanted = np.zeros(num_blocks + 1, np.bool_)
        """[blocks + 1], whether it stays when nobody holds it."""
        self.num_held = 0
        """Sets that are there and held."""
        self._unheld: dict[int, int] = {}
        """Sets that are there and nobody holds, in the order of their eviction: the tick since when."""
        self._new: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []

    @property
    def num_unheld_blocks(self) -> int:
        """Blocks of sets that nobody holds."""
        return self.groups.num_groups * len(self._unheld)

    def are_there(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[B], whether their sets are there."""
        there: NDArray[np.bool_] = self._sets[blocks, 0] > 0
        return there

    def will_be(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[B], whether their whole sets are there, or will be."""
        will_be: NDArray[np.bool_] = self.is_whole[blocks] | self.is_promised[blocks]
        return will_be

    def first_held(self, num_tokens: int) -> int:
        """The first block of tokens of a sequence that a step sees which computes tokens from num_tokens on."""
        return self.groups.first_seen(num_tokens + 1) // self._page_size

    def start(self, cached: NDArray[np.int32], start: int) -> int:
        """The last position, at most `start`, from which a prompt can be computed: what its layers with windows see is
        there, or will be. cached: its first blocks, at least start // page_size of them."""
        page_size, will_be = self._page_size, self.will_be(cached)
        if start == 0 or will_be[self.first_held(start) : -(-start // page_size)].all():
            return start
        ends = np.arange(start // page_size + 1)
        missing = np.where(will_be[: len(ends) - 1], -1, ends[:-1])
        last_missing = np.concatenate(([-1], np.maximum.accumulate(missing)))
        firsts = self.groups.first_seen(ends * page_size + 1) // page_size
        return int(np.flatnonzero(last_missing < firsts)[-1]) * page_size

    def want_end(self, blocks: NDArray[np.int32]) -> None:
        """Keep what a prompt sees that goes on after these blocks, or computes their last token again."""
        self.is_wanted[blocks[self.first_held(max(0, len(blocks) * self._page_size - 1)) :]] = True

    def hold(self, blocks: NDArray[np.int32]) -> None:
        """A sequence holds these sets."""
        is_first = self.num_holders[blocks] == 0
        self.num_holders[blocks] += 1
        first = blocks[is_first]
        for block in first[self.are_there(first)].tolist():
            del self._unheld[block]
            self.num_held += 1

    def drop(self, blocks: NDArray[np.int32], tick: int) -> NDArray[np.int32]:
        """Sequences no longer hold these sets, each as often as it is listed. Returns the blocks that are free now."""
        np.subtract.at(self.num_holders, blocks, 1)
        left = np.unique(blocks[self.num_holders[blocks] == 0])
        left = left[self.are_there(left)]
        self.num_held -= len(left)
        is_wanted = self.is_wanted[left] & self.is_whole[left]
        for block in left[is_wanted].tolist():
            self._unheld[block] = tick
        return self._take(left[~is_wanted])

    def add(self, blocks: NDArray[np.int32], own: NDArray[np.int32]) -> None:
        """Held blocks of tokens have these sets from now on. own: allocated, [B * G]."""
        sets = own.reshape(len(blocks), -1)
        self._sets[blocks] = sets
        self.num_held += len(blocks)
        self._new.append((blocks.astype(np.int32), sets))

    def note_whole(self, blocks: NDArray[np.int32]) -> None:
        """Steps are sent that compute the last tokens of these blocks, whose other tokens are computed."""
        self.is_whole[blocks], self.is_promised[blocks] = True, False

    def take_new(self) -> WindowBlocks | None:
        """What has been added since the last call."""
        if not self._new:
            return None
        blocks, sets = map(np.concatenate, zip(*self._new, strict=True))
        self._new = []
        return WindowBlocks(blocks, sets)

    def forget(self, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        """Blocks of tokens are free, and nobody holds their sets. Returns the blocks that are free with them."""
        assert not self.num_holders[blocks].any(), "a sequence holds the blocks of layers with windows"
        self.is_promised[blocks] = self.is_wanted[blocks] = False
        there = blocks[self.are_there(blocks)]
        for block in there.tolist():
            del self._unheld[block]
        return self._take(there)

    @property
    def oldest(self) -> int | None:
        """The tick since when nobody has held the set that is evicted first; None: there is none."""
        return next(iter(self._unheld.values()), None)

    def evict(self) -> NDArray[np.int32]:
        """Give up the set that nobody has held for the longest time. Returns its blocks."""
        block = next(iter(self._unheld))
        del self._unheld[block]
        return self._take(np.array([block], np.int32))

    def _take(self, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        """The blocks of their sets, which they no longer have."""
        if not len(blocks):
            return _NO_BLOCKS
        taken: NDArray[np.int32] = self._sets[blocks].reshape(-1)
        self._sets[blocks], self.is_whole[blocks] = 0, False
        return taken
