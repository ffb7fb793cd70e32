"""Which states of layers are kept for prompts to come, and in which snapshot.

A layer with a state keeps no keys and values of each token, but numbers of a fixed size that each token changes. So a
prompt can go on after cached tokens only where the states after them were kept. A snapshot is known by the block of
tokens after whose last token it was taken. A sequence promises it when it is admitted, and saves it in the step that
computes this token; others may start from it in any later step.
"""

import numpy as np
from numpy.typing import NDArray


class Snapshots:
    """The snapshot of every block of tokens, by its block id. B blocks of tokens."""

    def __init__(self, num_snapshots: int, num_blocks: int, page_size: int, interval: int) -> None:
        self.num_snapshots = num_snapshots
        self._page_size = page_size
        self._interval = max(1, interval // page_size) * page_size
        self._numbers = np.zeros(num_blocks + 1, np.int32)
        """[blocks + 1], the snapshot, from 1 on; 0: there is none, and nobody has promised one."""
        self.is_saved = np.zeros(num_blocks + 1, np.bool_)
        """[blocks + 1], whether the step that saves it is sent."""
        self.num_holders = np.zeros(num_blocks + 1, np.int32)
        """[blocks + 1], sequences that will start from it."""
        self._unheld: dict[int, None] = {}
        """Blocks whose snapshots are saved and nobody holds, in the order of their eviction."""
        self._free = list(range(num_snapshots, 0, -1))

    @property
    def num_used(self) -> int:
        """Snapshots that are kept or promised."""
        return self.num_snapshots - len(self._free)

    def number(self, block: int) -> int:
        """The block's snapshot; 0 if it has none."""
        return int(self._numbers[block])

    def start(self, cached: NDArray[np.int32], start: int) -> int:
        """The last position, at most `start`, at which the states are known, or will be. cached: a prompt's first
        blocks, at least start // page_size of them."""
        there = np.flatnonzero(self._numbers[cached[: start // self._page_size]])
        return (int(there[-1]) + 1) * self._page_size if len(there) else 0

    def wanted(self, start: int, num_cached: int, num_tokens: int) -> dict[int, bool]:
        """After how many tokens a prompt's states should be kept, the most wanted first; and whether others' may give
        way to it. That is before its last token, where its samples and prompts that go on meet; where it leaves
        another, if that is after its start; and, of what is free, at intervals.

        start: the first token that it computes. num_cached: tokens that it shares with others."""
        page_size = self._page_size
        end = (num_tokens - 1) // page_size * page_size
        positions = dict.fromkeys((end, min(num_cached // page_size * page_size, end)), True)
        for position in range(end // self._interval * self._interval, start, -self._interval):
            positions.setdefault(position, False)
        return {position: may_evict for position, may_evict in positions.items() if position > start}

    def hold(self, block: int) -> None:
        """A sequence will start from the block's snapshot."""
        self.num_holders[block] += 1
        self._unheld.pop(block, None)

    def drop(self, block: int) -> None:
        """A sequence has started from it, or has left."""
        self.num_holders[block] -= 1
        self._note_if_unheld(block)

    def promise(self, block: int, may_evict: bool = True) -> bool:
        """A sequence will save the snapshot of this block. False if it has one already, or none is free, and none that
        nobody holds may give way."""
        assert block, "padding has no states"
        if self._numbers[block] or not (self._free or (may_evict and self._unheld)):
            return False
        if not self._free:
            self._give_up(next(iter(self._unheld)))
        self._numbers[block] = self._free.pop()
        return True

    def break_promise(self, block: int) -> None:
        """The sequence that was to save it has left, or starts anew. Others that hold it must find another start."""
        assert not self.is_saved[block], "it is saved"
        self._give_up(block)

    def save(self, block: int) -> int:
        """A step is built that saves what was promised. Returns the snapshot."""
        self.is_saved[block] = True
        self._note_if_unheld(block)
        return int(self._numbers[block])

    def forget(self, blocks: NDArray[np.int32]) -> None:
        """Blocks of tokens are free, and with them their snapshots."""
        for block in blocks[self._numbers[blocks] > 0].tolist():
            assert not self.num_holders[block], "a sequence will start from the snapshot"
            self._give_up(block)

    def _note_if_unheld(self, block: int) -> None:
        if self.is_saved[block] and not self.num_holders[block]:
            self._unheld[block] = None

    def _give_up(self, block: int) -> None:
        self._unheld.pop(block, None)
        self._free.append(int(self._numbers[block]))
        self._numbers[block], self.is_saved[block] = 0, False
