"""The ordered queues of waiting and prefilling sequences, and the decoding slots."""

from collections import OrderedDict, deque

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.state.sequence import Phase, Sequence
from tokasaurus.manager.state.slot_arrays import SlotArrays

MOST_DROPPED = 64
"""Cancelled sequences that may stay in the queue however few sequences wait."""


class SequenceQueues:
    """Which sequences wait, prefill and decode. Draining sequences are in none of the three.

    `prefilling` is an OrderedDict because cancelled sequences leave from the middle, and because taking the first key
    of a plain dict repeatedly skips over all deleted entries each time. A cancelled sequence stays in `_waiting` until
    it reaches the front or too many have been cancelled. Sequences that wait for their grammar count in `num_waiting`
    but are not in `_waiting`.
    """

    def __init__(self, slots: SlotArrays) -> None:
        self._slots = slots
        self._waiting: deque[Sequence] = deque()
        self.num_waiting = 0
        self.prefilling: OrderedDict[Sequence, None] = OrderedDict()
        self._decoding: NDArray[np.int64] = np.empty(0, np.int64)

    def add_waiting(self, sequence: Sequence, first: bool = False) -> None:
        """Append `sequence`; put it in front if `first`, as after a preemption."""
        sequence.phase = Phase.WAITING
        self.num_waiting += 1
        if first:
            self._waiting.appendleft(sequence)
        else:
            self._waiting.append(sequence)

    def block(self, sequence: Sequence) -> None:
        """`sequence` waits, but may not be admitted before `unblock`."""
        sequence.phase = Phase.WAITING
        self.num_waiting += 1

    def unblock(self, sequence: Sequence) -> None:
        """Append a blocked sequence to the queue."""
        self._waiting.append(sequence)

    def drop_waiting(self, sequence: Sequence) -> None:
        """Remove a cancelled sequence."""
        sequence.phase = Phase.FINISHED
        self.num_waiting -= 1
        if len(self._waiting) > 2 * self.num_waiting + MOST_DROPPED:
            self._waiting = deque(sequence for sequence in self._waiting if sequence.phase is Phase.WAITING)

    def first_waiting(self, most: int) -> list[Sequence]:
        """Up to `most` waiting sequences, in admission order."""
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
        """Remove and return the first waiting sequence. Precondition: there is one."""
        self.num_waiting -= 1
        while True:
            sequence = self._waiting.popleft()
            if sequence.phase is Phase.WAITING:
                return sequence

    def add_decoding(self, slots: NDArray[np.int64]) -> None:
        """`slots` start to decode; they come after the slots that decode already."""
        before = self.decoding()
        self._slots.is_decoding[slots] = True
        self._decoding = np.concatenate((before, slots))

    def decoding(self) -> NDArray[np.int64]:
        """Decoding slots, in the order in which they started to decode. Read-only."""
        stays = self._slots.is_decoding[self._decoding]
        if not stays.all():
            self._decoding = self._decoding[stays]
        return self._decoding
