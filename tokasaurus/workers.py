"""How many replicas and model workers there are, by the flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig


def num_replicas(config: ServerConfig) -> int:
    """dp_size; auto is 1 until the launcher has chosen a number, which it gives all its processes."""
    return 1 if config.dp_size is None else config.dp_size


def num_workers(config: ServerConfig) -> int:
    """Model workers of all replicas together."""
    return num_replicas(config) * config.pp_size * config.tp_size
