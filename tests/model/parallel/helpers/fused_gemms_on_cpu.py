"""Let the compiler's micro-pipeline pass work on a CPU, where its operators are computed by torch's plain fallbacks."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch._inductor.config
import torch.distributed
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.fx import Graph

FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


@contextmanager
def fused_gemms_on_cpu(group_name: str) -> Iterator[list[dict[str, int]]]:
    """Inside, the pass takes gloo for NCCL, and this group, as it finds it in the graph, for one that shares memory.

    Yields a list to which each compiled graph appends how many of each of the operators FUSED and COLLECTIVES are in
    it, after the pass. Nothing comes from the compiler's cache.
    """
    graphs: list[dict[str, int]] = []

    def count(graph: Graph) -> None:
        names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        graphs.append(
            {name: found for name in (*FUSED, *COLLECTIVES) if (found := sum(f".{name}." in n for n in names))}
        )

    library = torch.library.Library("symm_mem", "IMPL")
    for name in FUSED:
        library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
    with (
        patch.object(torch.distributed, "is_nccl_available", return_value=True),
        symmetric_memory._test_mode({group_name}),
        torch._inductor.config.patch(post_grad_custom_post_pass=count),
    ):
        yield graphs
    library._destroy()
