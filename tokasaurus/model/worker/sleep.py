"""Sleep: memory of KV and weights is given back to the system and taken again. The cache and packed weights keep their
addresses."""

import threading

import torch

from tokasaurus.messages.commands import UpdateWeights
from tokasaurus.messages.status import first_line
from tokasaurus.model.attention.backend import AttentionBackend
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.weights import return_freed_memory
from tokasaurus.model.worker.weight_update import WeightUpdates


class Sleeper:
    """Gives one rank's memory back and takes it again. The other ranks of the replica must get the same calls."""

    def __init__(self, model: Decoder, backend: AttentionBackend, updates: WeightUpdates, device: torch.device) -> None:
        """The cache's memory is touched in the background from now on, as after each `wake`."""
        self._model = model
        self._backend = backend
        self._updates = updates
        self._device = device
        self._has_cache = self._has_weights = True
        self._has_weight_memory = True
        """It may lack weights all the same: see `wake`."""
        self._touching: list[threading.Thread] = []
        self._touch()

    @torch.inference_mode()
    def sleep(self, with_weights: bool) -> str:
        """Give the cache's memory back, and the weights' if asked; returns why it cannot be, in one line, or ""."""
        if self._device.type != "cpu":
            return "sleep is implemented on CPUs only"
        try:
            if self._has_cache:
                for thread in self._touching:  # they would take the memory again
                    thread.join()
                self._backend.give_back()
                self._has_cache = False
            if with_weights and self._has_weight_memory:
                self._model.give_back()
                self._has_weights = self._has_weight_memory = False
        except OSError as error:
            return first_line(error)
        return_freed_memory()
        return ""

    @torch.inference_mode()
    def wake(self, may_lack_weights: bool = False) -> str:
        """Take the memory again; returns why it cannot be, in one line, or "". After an error, the rank sleeps on.

        may_lack_weights: wake also if the weights cannot be read again. They must come by `update`, or at the next
        call."""
        if not self._has_weights:
            if not self._has_weight_memory:
                self._model.take_again()
            error = self._updates.apply_again()
            self._has_weights = not error
            if error and not may_lack_weights:
                if not self._has_weight_memory:
                    self._model.give_back()
                return f"the weights cannot be read again: {error}"
            self._has_weight_memory = True
        if not self._has_cache:
            self._backend.take_again()
            self._has_cache = True
            self._touch()
        return ""

    def update(self, update: UpdateWeights) -> str:
        """Apply a weight update; returns why nothing changed, or "". Precondition: the weights' memory has been taken
        again. Partial updates need the weights in it, too."""
        if not self._has_weights and update.is_partial:
            return "the weights have not been read again: an update of all weights must come before one of a part"
        error = self._updates.apply(update)
        self._has_weights |= not error
        return error

    def _touch(self) -> None:
        self._touching = self._backend.touch_in_background(max(1, torch.get_num_threads() // 2))
