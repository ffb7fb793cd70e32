"""Waiting and prefilling sequences in their order, and the slots that decode."""

from collections import OrderedDict, deque

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.state.sequence import Phase, Sequence
from tokasaurus.manager.state.slot_arrays import SlotArrays

MOST_DROPPED = 64
"""Cancelled sequences that may stay in the queue however few wait."""


class SequenceQueues:
    """Which sequences wait, which prefill, which decode; those that drain are in none of the three.

    prefilling is an ordered dict, because a cancelled sequence leaves from the middle, and because taking the first of
    a plain dict again and again walks over all that were deleted before it. A cancelled sequence stays in `_waiting`
    until it comes to the front, or until there are many. Those that wait for their grammar are counted, and are not in
    it.
    """

    def __init__(self, slots: SlotArrays) -> None:
        self._slots = slots
        self._waiting: deque[Sequence] = deque()
        self.num_waiting = 0
        self.prefilling: OrderedDict[Sequence, None] = OrderedDict()
        self._decoding: NDArray[np.int64] = np.empty(0, np.int64)

    def add_waiting(self, sequence: Sequence, first: bool = False) -> None:
        """At the end, or in front of all where it has been waiting before."""
        sequence.phase = Phase.WAITING
        self.num_waiting += 1
        if first:
            self._waiting.appendleft(sequence)
        else:
            self._waiting.append(sequence)

    def block(self, sequence: Sequence) -> None:
        """It waits, and is not to be admitted before `unblock`."""
        sequence.phase = Phase.WAITING
        self.num_waiting += 1

    def unblock(self, sequence: Sequence) -> None:
        """It waits behind all others from now on."""
        self._waiting.append(sequence)

    def drop_waiting(self, sequence: Sequence) -> None:
        """It waits no more: it was cancelled."""
        sequence.phase = Phase.FINISHED
        self.num_waiting -= 1
        if len(self._waiting) > 2 * self.num_waiting + MOST_DROPPED:
            self._waiting = deque(sequence for sequence in self._waiting if sequence.phase is Phase.WAITING)

    def first_waiting(self, most: int) -> list[Sequence]:
        """Up to `most` of them, in the order in which they are to be admitted."""
        while self._waiting and self._waiting[0].phase is not Phase.WAITING:
            self._waiting.popleft()
        found: list[Sequence] = []
        for sequence in self._waiting:
            if len(found) == most:
                break
            if sequence.phase is Phase.WAITING:
                found.append(sequence)
        return found

    def take_first_waiting(self) -> Sequence:
        """The first, which waits no more. There must be one."""
        self.num_waiting -= 1
        while True:
            sequence = self._waiting.popleft()
            if sequence.phase is Phase.WAITING:
                return sequence

    def add_decoding(self, slots: NDArray[np.int64]) -> None:
        """`slots` decode from now on, behind those that do."""
        before = self.decoding()
        self._slots.is_decoding[slots] = True
        self._decoding = np.concatenate((before, slots))

    def decoding(self) -> NDArray[np.int64]:
        """The slots that decode, in the order in which they began. Not to be changed."""
        stays = self._slots.is_decoding[self._decoding]
        if not stays.all():
            self._decoding = self._decoding[stays]
        return self._decoding
