"""The numbers by which the workers' rows have adapters, and the requests that wait for one."""

from collections import Counter, OrderedDict

import numpy as np

from tokasaurus.manager.state.sequence import Samples
from tokasaurus.manager.state.slot_arrays import SlotArrays
from tokasaurus.messages.status import AdapterLoad


class AdapterTable:
    """An adapter has a number while requests of it are in the queues or run, and until another one needs the number:
    the one whose requests ended first gives it up first.

    A request whose adapter cannot have a number is held back. From then on, so are all later ones, even of adapters
    that have one: adapters get their turn in the order in which their first requests were held back.
    """

    def __init__(self, num_numbers: int) -> None:
        self._free = list(range(num_numbers, 0, -1))
        self._numbers: OrderedDict[str, int] = OrderedDict()
        """By digest; those first whose last request ended first."""
        self._num_open = Counter[str]()
        """Requests that are not held back, by digest."""
        self._held: OrderedDict[str, dict[Samples, None]] = OrderedDict()
        self._released: list[Samples] = []
        self._new: list[tuple[int, str]] = []
        self.loaded: dict[str, None] = {}
        """Digests of adapters that the workers have."""

    def number(self, digest: str) -> int:
        """Of an adapter with open requests; 0 for no adapter."""
        return self._numbers[digest] if digest else 0

    def take_new(self) -> tuple[tuple[int, str], ...]:
        """Numbers that have become another adapter's since the last call."""
        new, self._new = tuple(self._new), []
        return new

    @property
    def num_held(self) -> int:
        """Sequences of requests that are held back."""
        return sum(map(self._num_held, self._held))

    def _num_held(self, digest: str) -> int:
        return sum(samples.request.num_sequences for samples in self._held.get(digest, ()))

    def loads(self, slots: SlotArrays) -> tuple[AdapterLoad, ...]:
        """Of each adapter that has sequences. slots: with those that run."""
        if not self._held and not slots.num_with_adapters:
            return ()
        counts = np.bincount(slots.adapters[slots.is_running], minlength=max(self._numbers.values(), default=0) + 1)
        running = {digest: int(counts[number]) for digest, number in self._numbers.items()}
        loads = (AdapterLoad(one, running.get(one, 0), self._num_held(one)) for one in {**running, **self._held})
        return tuple(load for load in loads if load.num_running or load.num_held)

    def is_held(self, samples: Samples) -> bool:
        return samples in self._held.get(samples.request.adapter, ())

    def begin(self, samples: Samples) -> bool:
        """Whether the request may be queued, which then counts as open. Otherwise it is held back."""
        digest = samples.request.adapter
        if self._held or not self._has_number(digest):
            self._held.setdefault(digest, {})[samples] = None
            return False
        self._num_open[digest] += 1
        return True

    def end(self, samples: Samples) -> None:
        """An open request has ended: others may have their turn."""
        digest = samples.request.adapter
        self._num_open[digest] -= 1
        if not self._num_open[digest]:
            del self._num_open[digest]
            if digest in self._numbers:
                self._numbers.move_to_end(digest)
        self._take_turns()

    def take_released(self) -> list[Samples]:
        """Requests whose turn has come since the last call: they are to be queued, and are open."""
        released, self._released = self._released, []
        return released

    def take_out(self, samples: Samples) -> bool:
        """Whether the request was held back. It is open now, perhaps without a number: it is to be queued and ended
        before any sequence is admitted."""
        if not self.is_held(samples):
            return False
        digest = samples.request.adapter
        del self._held[digest][samples]
        if not self._held[digest]:
            del self._held[digest]
        self._num_open[digest] += 1
        return True

    def forget(self, digest: str) -> None:
        """The workers no longer have the adapter, which has no requests."""
        assert digest not in self._num_open, "requests have the adapter"
        self.loaded.pop(digest, None)
        number = self._numbers.pop(digest, None)
        if number is not None:
            self._free.append(number)
        self._new = [new for new in self._new if new[1] != digest]

    def _take_turns(self) -> None:
        while self._held:
            digest = next(iter(self._held))
            if not self._has_number(digest):
                return
            held = self._held.pop(digest)
            self._num_open[digest] += len(held)
            self._released += held

    def _has_number(self, digest: str) -> bool:
        """Whether it has, perhaps from now on."""
        if digest in self._numbers:
            return True
        if not self._free:
            idle = next((other for other in self._numbers if other not in self._num_open), None)
            if idle is None:
                return False
            self._free.append(self._numbers.pop(idle))
        number = self._free.pop()
        self._numbers[digest] = number
        self._new = [*(new for new in self._new if new[0] != number), (number, digest)]
        return True
