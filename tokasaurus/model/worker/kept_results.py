"""What one start has measured on this machine, kept in the cache directory for later ones."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tokasaurus.checkpoint import CheckpointError, cache_directory
from tokasaurus.checkpoint.cache import cache_key
from tokasaurus.files import replace_text
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.cpu.build import LibraryUnavailable, processor_features


def path_of_results(kind: str, device: torch.device, kernels: Kernels | None, *parts: object) -> Path | None:
    """The file for results of a kind that depend on these parts, on the device, and on torch and its threads; None
    where the processor or the cache directory is not known. kernels: of the CPU, if any."""
    on_cuda = device.type == "cuda"
    try:
        own = [torch.cuda.get_device_name(device)] if on_cuda else processor_features()
        directory = cache_directory() / kind
    except (LibraryUnavailable, CheckpointError):
        return None
    own += [] if kernels is None else kernels.path.parts[-2:]
    key = cache_key(*parts, *own, torch.__version__, str(torch.get_num_threads()))
    return directory / f"{device.type}-{key}.json"


def keep_results(path: Path, results: Any) -> None:
    """Does nothing where the cache cannot be written: the next start measures again."""
    with suppress(OSError):
        replace_text(path, json.dumps(results))
