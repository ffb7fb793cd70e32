"""Small adapters in PEFT's format, for servers that compute nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.server.helpers.fake_engine import LIMITS, FakeEngine
from tokasaurus.checkpoint.adapters import read_adapter, write_adapter
from tokasaurus.messages.commands import EngineCommand, LoadAdapter, UnloadAdapter
from tokasaurus.messages.status import EngineLimits, Predecessors

WITH_ADAPTERS: EngineLimits = replace(LIMITS, no_adapters="")
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "org/small"}


def save_adapter(directory: Path, seed: int = 0, **config: Any) -> Path:
    """Equal seeds give equal digests. config: further keys of adapter_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(seed)
    tensors = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight": (
            "F32",
            shape,
            numbers.standard_normal(shape, np.float32).tobytes(),
        )
        for half, shape in (("A", (2, 8)), ("B", (8, 2)))
    }
    write_adapter(directory, CONFIG | config, tensors)
    return directory


def digest_of(directory: Path) -> str:
    return read_adapter(directory).digest


def engine_with_adapters(**fields: Any) -> FakeEngine:
    return FakeEngine(limits=WITH_ADAPTERS, **fields)


def keeping(directory: Path, **fields: Any) -> Predecessors:
    """Of a server that keeps its copies there."""
    return Predecessors(adapters_directory=str(directory), **fields)


def loads(engine: FakeEngine) -> list[tuple[str, str]]:
    """("load" or "unload", digest) of each command of that kind, in order."""
    return [
        ("load" if isinstance(command, LoadAdapter) else "unload", command.digest)
        for command in engine.commands
        if isinstance(command, LoadAdapter | UnloadAdapter)
    ]


def has(engine: FakeEngine) -> set[str]:
    """Digests that it has been given and not told to forget."""
    found: set[str] = set()
    for kind, digest in loads(engine):
        (found.add if kind == "load" else found.discard)(digest)
    return found


def refuses_loads(command: EngineCommand) -> str:
    """As FakeEngine.on_command."""
    return f"{command.directory}: no room" if isinstance(command, LoadAdapter) else ""
