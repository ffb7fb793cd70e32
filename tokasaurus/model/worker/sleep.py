"""Sleep: memory of KV and weights is given back to the system and taken again.

Tensors stay the same objects. On a CPU, the kernels' cache and packed weights also stay where they are, since kernels
have their addresses. On CUDA, memory that is taken again may be elsewhere. Graphs have addresses: they are dropped
before memory is given back, and recorded again once all of it has been taken again.
"""

import logging
import threading
from collections.abc import Callable

import torch

from tokasaurus.messages.commands import UpdateWeights
from tokasaurus.messages.status import first_line
from tokasaurus.model.attention.backend import AttentionBackend
from tokasaurus.model.decoder.model import Model
from tokasaurus.model.decoder.state_rows import StateRows
from tokasaurus.model.decoder.weights import return_freed_memory
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.collectives import least_of_ranks
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.weight_update import WeightUpdates

logger = logging.getLogger(__name__)


class Sleeper:
    """Gives one rank's memory back and takes it again. The other ranks of the replica must get the same calls."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        updates: WeightUpdates,
        device: torch.device,
        mesh: Mesh = Mesh(),  # noqa: B008  (it is frozen)
        runner: ModelRunner | None = None,
        record_graphs: Callable[[], None] = lambda: None,
    ) -> None:
        """The cache's memory is touched in the background from now on, as after each `wake`.

        runner: has the graphs, if there are any. record_graphs: lets it record all of them anew."""
        self._model = model
        self._backend = backend
        self._updates = updates
        self._device = device
        self._mesh = mesh
        self._runner = runner
        self._record_graphs = record_graphs
        self._dropped_graphs = False
        """Until they are recorded again."""
        self._has_cache = self._has_weights = True
        self._has_weight_memory = True
        """It may lack weights all the same: see `wake`."""
        self._touching: list[threading.Thread] = []
        self._touch()

    @torch.inference_mode()
    def sleep(self, with_weights: bool) -> str:
        """Give the cache's memory back, and the weights' if asked; returns why it cannot be, in one line, or ""."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        try:
            if self._has_cache:
                for thread in self._touching:  # they would take the memory again
                    thread.join()
                if self._runner is not None and self._runner.graph_sizes:
                    self._runner.drop_graphs()
                    self._dropped_graphs = True
                for owner in self._caches():
                    owner.give_back()
                self._has_cache = False
            if with_weights and self._has_weight_memory:
                self._model.give_back()
                self._has_weights = self._has_weight_memory = False
        except OSError as error:
            return first_line(error)
        self._return_freed()
        return ""

    @torch.inference_mode()
    def wake(self, may_lack_weights: bool = False) -> str:
        """Take the memory again; returns why it cannot be, in one line, or "". After an error, the rank sleeps on.

        may_lack_weights: wake also if the weights cannot be read again. They must come by `update`, or at the next
        call."""
        if not self._has_weights:
            if not self._has_weight_memory and (error := self._take(self._model)):
                return error
            error = self._updates.apply_again()
            self._has_weights = not error
            if error and not may_lack_weights:
                if not self._has_weight_memory:
                    self._model.give_back()
                    self._return_freed()
                return f"the weights cannot be read again: {error}"
            self._has_weight_memory = True
        if not self._has_cache:
            for owner in self._caches():
                if error := self._take(owner):
                    return error
            self._has_cache = True
            self._record_again()
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

    def _caches(self) -> list[AttentionBackend | StateRows]:
        """What keeps something of sequences."""
        return [self._backend, *([] if self._model.states is None else [self._model.states])]

    def _take(self, owner: Model | AttentionBackend | StateRows) -> str:
        """Let it take its memory again, on all ranks or on none; returns why it cannot, in one line, or ""."""
        error = self._on_all_ranks(owner.take_again)
        if error:
            owner.give_back()
            self._return_freed()
            return f"the memory cannot be taken again: {error}"
        return ""

    def _record_again(self) -> None:
        wanted, self._dropped_graphs = self._dropped_graphs, False
        if wanted and (error := self._on_all_ranks(self._record_graphs)):
            assert self._runner is not None
            self._runner.drop_graphs()
            logger.warning("CUDA graphs cannot be recorded again, and decode steps are slower without: %s", error)

    def _on_all_ranks(self, call: Callable[[], None]) -> str:
        """Returns "" if the call succeeds on every rank, or else why it does not, in one line."""
        error = ""
        try:
            call()
        except (OSError, RuntimeError) as failed:
            error = first_line(failed)
        if least_of_ranks(int(not error), self._mesh, self._device):
            return ""
        return error or "another rank has failed"

    def _return_freed(self) -> None:
        return_freed_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _touch(self) -> None:
        self._touching = self._backend.touch_in_background(max(1, torch.get_num_threads() // 2))
