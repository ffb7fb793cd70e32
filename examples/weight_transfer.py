"""New weights from a trainer to a server on the same machine: the `weight_transfer` of TRL's AsyncGRPOTrainer.

The server needs rl=T. docs/rl.md shows a trainer.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable

import requests
import torch
from safetensors.torch import save_file


class FileWeightTransfer:
    """Writes the weights to files in memory, and has the server read them. url: of the server, without /v1."""

    def __init__(self, url: str, directory: str = "/dev/shm", max_file_bytes: int = 4 << 30) -> None:
        self.url, self.directory, self.max_file_bytes = url.rstrip("/"), directory, max_file_bytes
        self.newest = ""  # the directory of the weights that the server has, left behind for it at the end

    def init_weight_transfer(self) -> None:
        requests.get(f"{self.url}/get_weight_version", timeout=60).raise_for_status()  # 404 without rl=T

    def pause(self) -> None:
        self._post("/pause?mode=keep")

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        directory = tempfile.mkdtemp(prefix="weights-", dir=self.directory)
        try:
            tensors: dict[str, torch.Tensor] = {}
            num_files = num_bytes = 0
            for name, tensor in iterator:
                if tensors and num_bytes + tensor.nbytes > self.max_file_bytes:
                    save_file(tensors, f"{directory}/{num_files}.safetensors")
                    tensors, num_files, num_bytes = {}, num_files + 1, 0
                tensors[name] = tensor.cpu().contiguous()
                num_bytes += tensor.nbytes
            save_file(tensors, f"{directory}/{num_files}.safetensors")
            self._post("/update_weights", {"weight_dir": directory})
            directory, self.newest = self.newest, directory
        finally:  # the newest weights stay: an engine that dies and starts again reads their files
            shutil.rmtree(directory, ignore_errors=True)

    def resume(self) -> None:
        self._post("/resume")

    def destroy(self) -> None:
        pass

    def _post(self, path: str, body: dict[str, str] | None = None) -> None:
        answer = requests.post(self.url + path, json=body, timeout=1800)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
