"""Flags → what Ray reserves for the processes of one `toka` on one node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokasaurus.config import ServerConfig
from tokasaurus.library.llm import flag_words
from tokasaurus.workers import num_workers

_OWN_FLAGS = ("host", "port", "unix_socket", "data_dir")
"""Flags that the owner of the processes sets itself, or that need one server for all requests."""
STRATEGY = "STRICT_PACK"
"""Strategy of placement groups: all bundles are on one node."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What the processes of one `toka` need. They belong to one actor, to which Ray shows its own GPUs alone, so that
    all are in one bundle."""

    num_gpus: int
    """0 on a CPU."""
    num_cpus: float
    num_workers: int
    """Processes that compute."""

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Bundles of the placement group: CPUs and GPUs."""
        bundle = {"CPU": float(self.num_cpus)}
        return [bundle | {"GPU": float(self.num_gpus)} if self.num_gpus else bundle]

    @property
    def actor_options(self) -> dict[str, Any]:
        """Ray's options for the actor that starts the processes."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        if not self.num_gpus and self.num_workers > 1:
            # Each would have as many threads as Ray says that the actor has CPUs.
            threads = max(1, int(self.num_cpus / self.num_workers))
            options["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": str(threads)}}
        return options


def place(config: ServerConfig, num_cpus: float | None, cluster_gpus: float) -> Placement:
    """One GPU for each rank of each pipeline stage of each replica, or CPUs.

    num_cpus: reserved for the actor; None: one for each process that computes. cluster_gpus: of the whole cluster, by
    which `device` is chosen where the flags leave it open."""
    num_processes = num_workers(config)
    is_on_gpus = config.device == "cuda" or (config.device is None and cluster_gpus > 0)
    cpus = float(num_processes) if num_cpus is None else num_cpus
    return Placement(num_processes if is_on_gpus else 0, cpus, num_processes)


def checked_words(flags: Mapping[str, Any]) -> list[str]:
    """Flags as on a command line. Raises TypeError, and ValueError, which names the flag."""
    for name in flags:
        if name not in ServerConfig.flags and name not in ServerConfig.retired:
            raise TypeError(f"flags: toka has no flag {name!r}")
        if name in _OWN_FLAGS:
            raise TypeError(f"flags: {name} cannot be chosen: Ray decides how the processes are reached")
    words = flag_words({"log_level": "warning", "dp_size": 1, **flags})
    ServerConfig.parse(words)
    return words


def words_on(placement: Placement, words: list[str]) -> list[str]:
    """The flags, with the device that the placement is for."""
    return [*words, f"device={'cuda' if placement.num_gpus else 'cpu'}"]
