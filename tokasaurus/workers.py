"""How many replicas, model workers and adapters there are, by the flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig


_NUM_ADAPTERS = 8
"""Trainers that go on while roll-outs run keep as many versions as these are behind, and two more."""

_MAX_RANK = 64


def num_replicas(config: ServerConfig) -> int:
    """dp_size; auto is 1 until the launcher has chosen a number, which it gives all its processes."""
    return 1 if config.dp_size is None else config.dp_size


def num_workers(config: ServerConfig) -> int:
    """Model workers of all replicas together."""
    return num_replicas(config) * config.pp_size * config.tp_size


def num_adapters(config: ServerConfig) -> int:
    """Adapters that steps may have at a time."""
    if config.max_loras is not None:
        return config.max_loras
    return _NUM_ADAPTERS if config.lora or config.rl else 0


def max_adapter_rank(config: ServerConfig) -> int:
    """Largest rank of an adapter: less where the flags do not say that there will be any, since GPUs reserve memory."""
    if config.max_lora_rank is not None:
        return config.max_lora_rank
    return _MAX_RANK if config.lora or config.max_loras else _MAX_RANK // 2
