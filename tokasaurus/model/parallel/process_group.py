"""The process group of a worker's tensor-parallel ranks: NCCL between CUDA devices, gloo between processes of a CPU."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from tokasaurus.model.parallel.mesh import Mesh

TIMEOUT = timedelta(minutes=5)
"""Longest wait of a rank for the others, in a collective or at the start. One that reads its weights from a slow disk
may be so late. Nobody waits for a dead one: gloo notices its death at once, and so does the launcher."""


def is_about_another_rank(error: RuntimeError) -> bool:
    """Whether a collective failed, most likely because another rank has ended. Gloo has no error class of its own."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


@contextmanager
def joined(mesh: Mesh, rendezvous: Path | None, device: torch.device) -> Iterator[Mesh]:
    """Inside, `mesh` with its tp_group. With one rank per stage, the same mesh.

    rendezvous: a path that all workers of the replica agree on, and that no earlier replica has used; a file is made
    for each stage. None with one rank. Blocks until all ranks of the stage have called it.
    """
    if mesh.tp_size == 1:
        yield mesh
        return
    assert rendezvous is not None, "ranks need a place to meet"
    on_cuda = device.type == "cuda"
    # The ranks are on one machine: gloo must neither look up its name nor listen where others can connect.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    torch.distributed.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=f"file://{rendezvous}-stage{mesh.pp_rank}",
        rank=mesh.tp_rank,
        world_size=mesh.tp_size,
        timeout=TIMEOUT,
        device_id=device if on_cuda else None,
    )
    try:
        yield replace(mesh, tp_group=torch.distributed.group.WORLD)
    except BaseException:
        # Gloo's threads abort a process that ends while they run. NCCL might wait for a dead rank instead.
        if not on_cuda:
            torch.distributed.destroy_process_group()
        raise
    torch.distributed.destroy_process_group()
