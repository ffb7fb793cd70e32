"""Adapters that the flag lora= names: copied and checked before any process starts."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from tokasaurus.checkpoint import CheckpointError
from tokasaurus.checkpoint.adapters import copy_adapter
from tokasaurus.checkpoint.cache import expand_home
from tokasaurus.messages.commands import NamedAdapter, adapter_version
from tokasaurus.messages.status import FlagRefused, first_line


def copy_named(lora: Mapping[str, str], copies: Path, max_rank: int) -> tuple[NamedAdapter, ...]:
    """Copy each into a directory of its own, named by its digest. lora: directories by name. copies: is not there yet.
    Raises FlagRefused."""
    adapters = []
    for name, source in lora.items():
        incoming = copies / "incoming"
        incoming.mkdir(parents=True)
        try:
            digest = copy_adapter(expand_home("lora", source), incoming, max_rank).digest
        except (CheckpointError, OSError, ValueError) as error:  # ValueError: a path with a zero byte
            raise FlagRefused(f"lora: {name}: {first_line(error)}") from None
        directory = copies / digest
        if directory.exists():  # another name has the same
            shutil.rmtree(incoming)
        else:
            incoming.rename(directory)
        adapters.append(NamedAdapter(name, digest, str(directory), source, adapter_version(name, digest)))
    return tuple(adapters)
