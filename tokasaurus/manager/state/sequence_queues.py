"""The ordered queues of waiting and prefilling sequences, and the decoding slots."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.state.fair_queue import FairQueue
from tokasaurus.manager.state.samples import Samples
from tokasaurus.manager.state.sequence import Phase, Sequence
from tokasaurus.manager.state.slot_arrays import SlotArrays

LIVE_PER_BACKGROUND = 64
"""Live sequences admitted for each background one while both wait."""


class SequenceQueues:
    """Which sequences wait, prefill and decode. Draining sequences are in none of the three.

    Waiting sequences are admitted in the order of FairQueue, those of background requests after all others; but one of
    them is admitted after LIVE_PER_BACKGROUND others that were taken while it waited, so that none waits for ever.
    Sequences that wait for their grammar count in `num_waiting`, but have no place in that order yet.

    `prefilling` is an OrderedDict because cancelled sequences leave from the middle, and because taking the first key
    of a plain dict repeatedly skips over all deleted entries each time.
    """

    def __init__(self, slots: SlotArrays) -> None:
        self._slots = slots
        self._live, self._background = FairQueue(), FairQueue()
        self._num_live_taken = 0
        """Live sequences taken since the last background one, while a background one waited."""
        self._blocked: set[Sequence] = set()
        self.num_waiting = 0
        self.prefilling: OrderedDict[Sequence, None] = OrderedDict()
        self._decoding: NDArray[np.int64] = np.empty(0, np.int64)

    def add_waiting(self, sequence: Sequence, first: bool = False) -> None:
        """Queue `sequence`; put it in front of its class, live or background, if `first`, as after a preemption."""
        sequence.phase = Phase.WAITING
        self.num_waiting += 1
        queue = self._queue_of(sequence)
        if first:
            queue.add_preempted(sequence)
        else:
            queue.add(sequence)

    def add_samples(self, samples: Samples) -> None:
        """Queue the sequences that are to be created. Precondition: there are some."""
        self.num_waiting += samples.num_to_create
        self._queue_of(samples).add(samples)

    def block(self, sequence: Sequence) -> None:
        """`sequence` waits, but may not be admitted before `unblock`."""
        sequence.phase = Phase.WAITING
        self.num_waiting += 1
        self._blocked.add(sequence)

    def unblock(self, sequence: Sequence) -> None:
        """Queue a blocked sequence."""
        self._blocked.remove(sequence)
        self._queue_of(sequence).add(sequence)

    def drop_waiting(self, sequence: Sequence) -> None:
        """Remove a cancelled sequence, blocked or not."""
        sequence.phase = Phase.FINISHED
        self.num_waiting -= 1
        if sequence in self._blocked:
            self._blocked.remove(sequence)
        else:
            self._queue_of(sequence).remove(sequence)

    def drop_samples(self, samples: Samples) -> None:
        """Create no more sequences of a cancelled request. Precondition: some are to be created."""
        self.num_waiting -= samples.num_to_create
        self._queue_of(samples).remove_samples(samples)

    def first_waiting(self, most: int) -> list[Sequence]:
        """Up to `most` waiting sequences, in admission order. Creates those that do not exist yet."""
        return list(islice(self._in_order(), most))

    def _in_order(self) -> Iterator[Sequence]:
        live, background = self._live.in_order(), self._background.in_order()
        num_live_taken, next_background = self._num_live_taken, next(background, None)
        for sequence in live:
            if next_background is None:
                yield sequence
                continue
            if num_live_taken == LIVE_PER_BACKGROUND:
                yield next_background
                num_live_taken, next_background = 0, next(background, None)
            yield sequence
            num_live_taken += next_background is not None
        if next_background is not None:
            yield next_background
            yield from background

    def take_first_waiting(self) -> Sequence:
        """Remove and return the first waiting sequence. Precondition: there is one that is not blocked."""
        self.num_waiting -= 1
        if not self._background:
            return self._live.take()
        if self._live and self._num_live_taken < LIVE_PER_BACKGROUND:
            self._num_live_taken += 1
            return self._live.take()
        self._num_live_taken = 0
        return self._background.take()

    def _queue_of(self, entry: Sequence | Samples) -> FairQueue:
        return self._background if entry.request.is_background else self._live

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
