"""Adapters for a running model: each is read and checked by every rank before any of them has it."""

from pathlib import Path

import torch

from tokasaurus.checkpoint import CheckpointError
from tokasaurus.checkpoint.adapters import read_adapter
from tokasaurus.messages.commands import LoadAdapter, UnloadAdapter
from tokasaurus.messages.status import first_line
from tokasaurus.model.decoder.adapters import AdapterShare, ModelAdapters
from tokasaurus.model.parallel.collectives import least_of_ranks
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.monitoring.shortage import describe_shortage


class AdapterLoads:
    """Loads adapters into one rank's model. The other ranks of the replica must get the same calls, in order."""

    def __init__(self, adapters: ModelAdapters, max_rank: int, mesh: Mesh, device: torch.device) -> None:
        self._adapters = adapters
        self._max_rank = max_rank
        self._mesh = mesh
        self._device = device

    @torch.inference_mode()
    def load(self, command: LoadAdapter) -> str:
        """Returns why no rank has it, in one line, or "". Steps may run."""
        share, error = None, ""
        if command.digest not in self._adapters:
            try:
                share = self._read(command)
            except (CheckpointError, OSError) as refused:
                error = first_line(refused)
            except (MemoryError, RuntimeError) as failed:
                error = describe_shortage(failed, "unload other adapters") or ""
                if not error:
                    raise
        if not least_of_ranks(int(not error), self._mesh, self._device):
            return error or "another rank cannot load the adapter"
        if share is not None:
            self._adapters.load(command.digest, share)
        return ""

    def _read(self, command: LoadAdapter) -> AdapterShare:
        adapter = read_adapter(Path(command.directory), self._max_rank)
        if adapter.digest != command.digest:
            raise CheckpointError(f"the files in {command.directory} have changed since the adapter was loaded")
        return self._adapters.share(adapter)

    @torch.inference_mode()
    def unload(self, command: UnloadAdapter) -> str:
        """Returns "". No step has it any more."""
        self._adapters.unload(command.digest)
        return ""
