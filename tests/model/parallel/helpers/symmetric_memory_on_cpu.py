"""Let SymmetricBuffer work on a CPU, where gloo computes what its operators do."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]


@contextmanager
def symmetric_memory_on_cpu(
    has_multicast: bool = True, factor: float = 1.0, lacks_memory: bool = False, cannot_join: bool = False
) -> Iterator[Counter[str]]:
    """Inside, memory is shared by ranks over gloo; yields how often each operator was called.

    Each operator takes its operand from a shared buffer only, as on a GPU. factor: by which this rank's sums are
    multiplied: with 1 they are right. lacks_memory, cannot_join: what fails on this rank.
    """
    shared: list[Tensor] = []
    calls: Counter[str] = Counter()

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if lacks_memory:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore of it")
        shared.append(torch.full(size, torch.nan, dtype=dtype, device=device))
        return shared[-1]

    def rendezvous(buffer: Tensor, group: Any) -> SimpleNamespace:
        assert any(buffer is one for one in shared)
        _resolve_process_group(group)
        if cannot_join:
            raise RuntimeError("CUDA driver error: invalid device ordinal\nmore of it")
        return SimpleNamespace(multicast_ptr=7 if has_multicast else 0)

    def summed(own: Tensor, reduce_op: str, group: Any) -> Tensor:
        assert reduce_op == "sum"
        assert own.is_contiguous()
        assert own.numel() * own.itemsize % 4 == 0
        assert any(own.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in shared)
        total = own.clone()
        torch.distributed.all_reduce(total, group=_resolve_process_group(group))
        return total * factor

    def one_shot_all_reduce_out(own: Tensor, reduce_op: str, group: Any, out: Tensor) -> Tensor:
        calls["one_shot_all_reduce_out"] += 1
        return out.copy_(summed(own, reduce_op, group))

    def multimem_all_reduce_(own: Tensor, reduce_op: str, group: Any) -> Tensor:
        assert has_multicast
        calls["multimem_all_reduce_"] += 1
        return own.copy_(summed(own, reduce_op, group))

    library = torch.library.Library("symm_mem", "IMPL")
    for function in (one_shot_all_reduce_out, multimem_all_reduce_):
        library.impl(function.__name__, function, "CPU")
    with patch.object(symmetric_memory, "empty", empty), patch.object(symmetric_memory, "rendezvous", rendezvous):
        yield calls
    library._destroy()
