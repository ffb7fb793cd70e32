"""Async tensor parallelism: gemms that torch fuses with the exchange of tokens between the ranks.

Between two gemms, each rank has the hidden states of its own share of the tokens. The compiler's micro-pipeline pass
(`FUSE_WITH_GEMMS`) makes one operator of a gemm and the collective beside it, which computes one part of the tokens
while another part is on its way. Without the pass, the collective and the gemm run one after the other.
"""

# T tokens in this forward, S = T / tp_size tokens of one rank, E hidden size

import warnings

import torch
import torch.distributed
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from tokasaurus.messages.status import FlagRefused
from tokasaurus.model.parallel.collectives import gather_into
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.symmetric_all_reduce import unreadable_device

FUSE_WITH_GEMMS = {"_micro_pipeline_tp": True}
"""Compiler options of functions that call `gather_matmul` and `matmul_scatter`."""

# torch 2.13 renamed them, and warns of the old names; 2.11 has only these.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_reduce_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor


def own_tokens(hidden: Tensor, mesh: Mesh) -> Tensor:
    """hidden [T, E], the same on every rank -> [S, E], a copy of this rank's tokens.

    Precondition: tp_size divides T.
    """
    # A view would start at another offset in each forward, and the compiler compiles again for some of them.
    return hidden.chunk(mesh.tp_size)[mesh.tp_rank].clone()


def all_tokens(shard: Tensor, mesh: Mesh) -> Tensor:
    """shard [S, E], each rank's tokens -> [T, E], on every rank."""
    hidden = shard.new_empty((len(shard) * mesh.tp_size, *shard.shape[1:]))
    gather_into(hidden, shard.contiguous(), mesh)
    return hidden


def gather_matmul(shard: Tensor, weight: Tensor, mesh: Mesh) -> Tensor:
    """shard [S, in], each rank's tokens; weight [out, in], of this rank's output features -> [T, out].

    Add no bias to the result itself, but to a view of it: the compiler would fuse it with the gemm, and the collective
    could not be.
    """
    assert mesh.tp_group is not None
    gathered: Tensor = _all_gather(shard, 0, mesh.tp_group)
    return gathered @ weight.t()


def matmul_scatter(x: Tensor, weight: Tensor, mesh: Mesh) -> Tensor:
    """x [T, in], this rank's input features of all tokens; weight [out, in] -> [S, out], the sums over the ranks for
    this rank's tokens."""
    assert mesh.tp_group is not None
    scattered: Tensor = _reduce_scatter(x @ weight.t(), "sum", 0, mesh.tp_group)
    return scattered


def enable_fused_gemms(threshold: int, mesh: Mesh, device: torch.device, first_device: int) -> None:
    """Prepare the ranks' memory for the fused operators. Every rank of the group must call it, before it compiles.

    threshold: named in the error. first_device: index of the first rank's CUDA device; the others follow. Raises
    UserError, in one line, if the devices cannot read each other's memory.
    """
    flag = f"async_tp_threshold={threshold}"
    if device.type != "cuda":
        raise FlagRefused(f"{flag}: needs GPUs that are joined by NVLink, not device={device.type}")
    if not torch.distributed.is_nccl_available():
        raise FlagRefused(f"{flag}: needs a torch with NCCL")
    other = unreadable_device(device, first_device, mesh.tp_size)
    if other is not None:
        raise FlagRefused(f"{flag}: needs GPUs that are joined by NVLink; {device} cannot read memory of cuda:{other}")
    from torch.distributed import _symmetric_memory as symmetric_memory

    assert mesh.tp_group is not None
    name = mesh.tp_group.group_name
    try:
        with warnings.catch_warnings():
            # It calls itself superfluous, but the compiler's pass leaves out every group that is not registered by it.
            warnings.simplefilter("ignore", FutureWarning)
            symmetric_memory.enable_symm_mem_for_group(name)
        symmetric_memory.rendezvous(symmetric_memory.empty(1, dtype=torch.float32, device=device), name)
    except RuntimeError as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise FlagRefused(f"{flag}: the GPUs cannot share memory: {reason.strip()}") from error
