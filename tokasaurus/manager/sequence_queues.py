"""Waiting, prefilling, decoding and draining sequences, each in order of arrival there."""

from collections import OrderedDict

from tokasaurus.manager.sequence import Phase, Sequence


class SequenceQueues:
    """Every unfinished sequence is in exactly one queue: that of its phase.

    Ordered dicts, because a cancelled sequence leaves from the middle, and because taking the first of a plain dict
    again and again walks over all that were deleted before it.
    """

    def __init__(self) -> None:
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.prefilling: OrderedDict[Sequence, None] = OrderedDict()
        self.decoding: OrderedDict[Sequence, None] = OrderedDict()
        self.draining: OrderedDict[Sequence, None] = OrderedDict()
        self._of_phase = {
            Phase.WAITING: self.waiting,
            Phase.PREFILL: self.prefilling,
            Phase.DECODE: self.decoding,
            Phase.DRAINING: self.draining,
        }

    @property
    def num_running(self) -> int:
        """Sequences that own a slot."""
        return len(self.prefilling) + len(self.decoding) + len(self.draining)

    def add(self, sequence: Sequence) -> None:
        """A new sequence, at the end of the waiting ones."""
        self.waiting[sequence] = None

    def move(self, sequence: Sequence, phase: Phase) -> None:
        """To the end of another queue; out of all of them with FINISHED."""
        del self._of_phase[sequence.phase][sequence]
        sequence.phase = phase
        if phase is not Phase.FINISHED:
            self._of_phase[phase][sequence] = None
