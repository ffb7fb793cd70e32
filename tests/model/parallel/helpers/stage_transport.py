"""Transfers between pipeline stages that are all in this process, with NCCL's order: on each rank, those of a group run
one after another, and a transfer needs both its sender and its receiver."""

from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.stage_links import StageLinks


class Deadlock(Exception):
    """A wait that nothing ends: all that could run has run."""


@dataclass(frozen=True)
class End:
    """One rank's end of a group."""

    rank: int
    group: str


@dataclass
class Transfer:
    """One end of a transfer; implements Work."""

    transport: "Transport"
    tensor: Tensor
    peer: int
    is_send: bool
    is_done: bool = False

    def wait(self) -> None:
        self.transport.run()
        if not self.is_done:
            raise Deadlock


@dataclass
class Transport:
    waiting: defaultdict[End, deque[Transfer]] = field(default_factory=lambda: defaultdict(deque))
    sent: list[Tensor] = field(default_factory=list)
    """What was handed over to be sent, in order."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.distributed, "isend", self._isend)
        monkeypatch.setattr(torch.distributed, "irecv", self._irecv)

    def _isend(self, tensor: Tensor, peer: int, group: End) -> Transfer:
        self.sent.append(tensor)
        return self._begin(group, Transfer(self, tensor, peer, is_send=True))

    def _irecv(self, tensor: Tensor, peer: int, group: End) -> Transfer:
        return self._begin(group, Transfer(self, tensor, peer, is_send=False))

    def _begin(self, end: End, transfer: Transfer) -> Transfer:
        self.waiting[end].append(transfer)
        return transfer

    def run(self) -> None:
        """All transfers that can run now."""
        while any(self._run_first(end) for end in list(self.waiting)):
            pass

    def _run_first(self, end: End) -> bool:
        """Whether the first transfer of this end has run."""
        transfers = self.waiting[end]
        if not transfers or not transfers[0].is_send:
            return False
        send = transfers[0]
        others = self.waiting[End(send.peer, end.group)]
        if not others or others[0].is_send or others[0].peer != end.rank:
            return False
        receive = others.popleft()
        transfers.popleft()
        assert receive.tensor.shape == send.tensor.shape, "both know the size"
        assert receive.tensor.is_contiguous()
        assert send.tensor.is_contiguous()
        receive.tensor.copy_(send.tensor)
        send.is_done = receive.is_done = True
        return True


def stage_meshes(pp_size: int, shares_group: bool = False) -> list[Mesh]:
    """Of each stage, with the groups that `with_groups` makes; shares_group: with one for all hidden states instead."""
    meshes = [Mesh(pp_rank=rank, pp_size=pp_size) for rank in range(pp_size)]

    def link(rank: int, first: int) -> Any:
        return End(rank, "all" if shares_group else f"{first} to {first + 1}")

    def tokens(rank: int) -> Any:
        return End(rank, "tokens")

    return [
        replace(
            mesh,
            previous_group=None if mesh.is_first_stage else link(mesh.pp_rank, mesh.pp_rank - 1),
            next_group=None if mesh.is_last_stage else link(mesh.pp_rank, mesh.pp_rank),
            token_group=tokens(mesh.pp_rank) if mesh.is_first_stage or mesh.is_last_stage else None,
        )
        for mesh in meshes
    ]


def link_stages(meshes: list[Mesh], num_tokens: int, hidden_size: int, num_slots: int) -> list[StageLinks]:
    """num_tokens: of the largest step."""

    def buffers(mesh: Mesh) -> list[Tensor]:
        return [torch.full((num_tokens, hidden_size), torch.nan) for _ in range(mesh.num_hidden_buffers)]

    return [StageLinks(mesh, buffers(mesh), num_slots) for mesh in meshes]
