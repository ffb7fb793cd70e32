"""The process groups of a replica's workers: NCCL between CUDA devices, gloo between processes of a CPU."""

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
    """Inside, `mesh` with its groups. With one rank, the same mesh.

    rendezvous: a path that all workers of the replica agree on, and that no earlier replica has used; a file is made
    there. None with one rank. Blocks until all ranks have called it.
    """
    if mesh.num_ranks == 1:
        yield mesh
        return
    assert rendezvous is not None, "ranks need a place to meet"
    on_cuda = device.type == "cuda"
    # The ranks are on one machine: gloo must neither look up its name nor listen where others can connect.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    torch.distributed.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=f"file://{rendezvous}",
        rank=mesh.world_rank,
        world_size=mesh.num_ranks,
        timeout=TIMEOUT,
        device_id=device if on_cuda else None,
    )
    try:
        yield _with_groups(mesh)
    except BaseException:
        # Gloo's threads abort a process that ends while they run. NCCL might wait for a dead rank instead.
        if not on_cuda:
            torch.distributed.destroy_process_group()
        raise
    torch.distributed.destroy_process_group()


def _with_groups(mesh: Mesh) -> Mesh:
    """Every rank must make every group, also those of others."""
    world = torch.distributed.group.WORLD
    if mesh.pp_size == 1:
        return replace(mesh, tp_group=world)
    tp_groups = []
    for stage in range(mesh.pp_size if mesh.tp_size > 1 else 0):
        first = stage * mesh.tp_size
        tp_groups.append(torch.distributed.new_group(list(range(first, first + mesh.tp_size)), timeout=TIMEOUT))
    token_group = torch.distributed.new_group(timeout=TIMEOUT)
    tp_group = tp_groups[mesh.pp_rank] if tp_groups else None
    return replace(mesh, tp_group=tp_group, stage_group=world, token_group=token_group)
