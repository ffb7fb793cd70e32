"""New weights for a running model, in place: checked by every rank before any of them changes anything."""

import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from tokasaurus.checkpoint import (
    CheckpointError,
    ModelInfo,
    check_copy,
    file_states,
    quantization_of_update,
    update_files,
)
from tokasaurus.checkpoint.gguf.model import is_gguf
from tokasaurus.checkpoint.quantized.config import Quantization
from tokasaurus.checkpoint.weight_files import read_tensors
from tokasaurus.messages.commands import FIRST_VERSION, FileState, UpdateWeights, add_update
from tokasaurus.messages.status import first_line
from tokasaurus.model.decoder.model import Model
from tokasaurus.model.decoder.tensor_files import DEQUANTIZED_DTYPES
from tokasaurus.model.decoder.uploads import uploads_to
from tokasaurus.model.decoder.weights import WeightShard, check_update, return_freed_memory, write_update
from tokasaurus.model.parallel.collectives import least_of_ranks
from tokasaurus.model.parallel.mesh import Mesh

logger = logging.getLogger(__name__)


class WeightUpdates:
    """Applies weight updates to one rank's model. The other ranks of the replica must get the same calls, in order."""

    def __init__(
        self,
        model: Model,
        info: ModelInfo,
        directory: Path,
        mesh: Mesh,
        device: torch.device,
        files: tuple[FileState, ...] = (),
    ) -> None:
        """directory: of the checkpoint. files: its weights' files, as the server's start has found them; () if they
        may change."""
        self._model = model
        self._directory = directory
        self._files = files
        self._mesh = mesh
        self._device = device
        stored: torch.dtype = getattr(torch, info.dtype)
        self._quantization = info.quantization
        self._dtypes = {model.weight_dtype, stored}
        self._applied: list[UpdateWeights] = []
        """All that differs from the checkpoint: the last whole update, and the parts since."""

    def _shards(self) -> Iterator[WeightShard]:
        return iter(self._model.weight_shards())

    @torch.inference_mode()  # what was made in it may be changed only in it
    def apply(self, update: UpdateWeights) -> str:
        """Write new weights; returns why nothing was changed, in one line, or "" after the update. No step may run.

        Raises CheckpointError if a file that was readable just before is no longer: the weights are then a mixture, and
        the process must end.
        """
        error, files, quantization = "", list[Path](), None
        try:
            quantization = quantization_of_update(Path(update.directory), self._quantization)
            files = update_files(Path(update.directory))
            if update.files and file_states(files) != update.files:
                raise CheckpointError(f"files in {update.directory} have changed since the update was asked for")
            dtypes = self._dtypes if quantization is None and not is_gguf(files[0]) else DEQUANTIZED_DTYPES
            self._check_copies(files, update, quantization)
            check_update(files, self._shards(), self._model.ignores, dtypes, update.is_partial, quantization)
        except (CheckpointError, OSError) as refused:
            error = first_line(refused)
        if not least_of_ranks(int(not error), self._mesh, self._device):
            return error or "another rank cannot use the new weights"
        with uploads_to(self._device) as uploads:
            write_update(files, self._shards(), quantization, uploads)
        return_freed_memory()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        add_update(self._applied, update)
        return ""

    def _check_copies(self, files: list[Path], update: UpdateWeights, quantization: Quantization | None) -> None:
        """Raises CheckpointError if tensors differ that the model has as one."""
        tensors = read_tensors(files, quantization) if self._model.copies else {}
        earlier = [*(Path(each.directory) for each in reversed(self._applied)), self._directory]
        for copy, name in self._model.copies.items():
            if copy in tensors:
                check_copy(copy, name, tensors, earlier if update.is_partial else [], self._quantization)

    def apply_again(self) -> str:
        """Write all weights anew after their memory was given back. Returns as `apply` does."""
        before = [*self._applied]  # `apply` changes it
        updates = before
        if not updates or updates[0].is_partial:
            updates = [UpdateWeights(0, str(self._directory), FIRST_VERSION, files=self._files), *updates]
        for update in updates:
            if error := self.apply(update):
                self._applied = before  # all of them are still wanted at the next call
                return error
        return ""
