"""Runs the Triton kernels of the layers in Triton's interpreter. Run as a module.

A process of its own: the variable TRITON_INTERPRET must be set before anything imports Triton, and then holds for all.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import concurrent.futures
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from tests.helpers.tiny_model import FAMILIES, save_tiny_model
from tests.model.decoder.helpers.layer_kernels import LayerKernels
from tests.model.helpers.greedy_decoding import load
from tokasaurus.model.decoder import layers, triton_layers
from tokasaurus.model.execution import executors
from tokasaurus.model.execution.executors import FusedExecutor, ModuleExecutor
from tokasaurus.model.parallel.mesh import Mesh


def check_layers(family: str) -> None:
    """Whole layers, twice over the same memory, as the modules compute them; a token that is not finite among them."""
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        save_tiny_model(Path(directory), family)
        model, _ = load(Path(directory))
        with patch.object(executors, "uses_triton", lambda *_: True):
            fused = executors.choose_executor(model, None)  # type: ignore[arg-type]
        assert isinstance(fused, FusedExecutor)
        cos_sin = torch.rand(5, 1, model.head_dim)
        seen: list[tuple[Tensor, ...]] = []

        def attends(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            layer_index: int,  # noqa: ARG001  (the names are those of Attends)
            output: Tensor | None = None,  # noqa: ARG001
        ) -> Tensor:
            seen.append((query, key, value))
            group = query.shape[1] // key.shape[1]
            return query * key.repeat_interleave(group, 1) + value.repeat_interleave(group, 1)

        for turn in range(2):
            hidden = torch.randn(5, model.hidden_size, generator=torch.Generator().manual_seed(turn))
            hidden[3, 7] = torch.inf
            expected = ModuleExecutor(model).run(hidden.clone(), cos_sin, attends)
            middle = len(seen)
            got = fused.run(hidden, cos_sin, attends)
            assert got.data_ptr() == hidden.data_ptr()
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5, equal_nan=True)
            assert got.isnan().any(1).tolist() == [False, False, False, True, False]
            for own, others in zip(seen[middle:], seen[:middle], strict=True):
                for token in (0, 1, 2, 4):  # the query of the other is NaN
                    torch.testing.assert_close(
                        [x[token] for x in own], [x[token] for x in others], atol=2e-5, rtol=2e-5
                    )
                assert not own[1][3].any()
                assert not own[2][3].any()
            seen.clear()


def attends_alone(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_index: int,  # noqa: ARG001  (the names are those of Attends)
    output: Tensor | None = None,  # noqa: ARG001
) -> Tensor:
    """Each token sees itself alone, with a weight that depends on its query and key."""
    group = query.shape[1] // key.shape[1]
    weight = (query * key.repeat_interleave(group, 1)).sum(-1, keepdim=True).sigmoid()
    return weight * value.repeat_interleave(group, 1)


class Launching:
    """The kernels, of which one runs at a time: the interpreter is for one thread."""

    lock = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., object]:
        def launch(*arguments: object) -> object:
            with self.lock:
                return getattr(triton_layers, name)(*arguments)

        return launch


def break_token(_module: object, _inputs: object, features: Tensor) -> None:
    features[2, -1] = torch.inf


def run_ranks(directory: Path, hidden: Tensor, cos_sin: Tensor, overflow_on: int) -> list[Tensor]:
    """What two tensor-parallel ranks, each a thread, compute. The first layer's values of token 2 are not finite on the
    rank `overflow_on` alone."""
    partials: dict[int, Tensor] = {}
    barrier = threading.Barrier(2)

    def summed(partial: Tensor, mesh: Mesh) -> Tensor:
        partials[mesh.tp_rank] = partial.clone()
        barrier.wait(timeout=60)
        total = partials[0] + partials[1]
        barrier.wait(timeout=60)
        return total

    fused: list[FusedExecutor] = []
    for rank in range(2):
        model, _ = load(directory, Mesh.of_worker(rank, pp_size=1, tp_size=2))
        fused.append(FusedExecutor(model))
        fused[rank]._kernels = Launching()  # type: ignore[assignment]
        if rank == overflow_on:
            next(iter(model.decoder_layers())).own_attention.qkv.register_forward_hook(break_token)

    def run(executor: FusedExecutor) -> Tensor:
        with torch.inference_mode():
            return executor.run(hidden.clone(), cos_sin, attends_alone)

    with patch.object(layers, "sum_over_shards", summed), concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, fused))


def check_ranks_and_stages(family: str) -> None:
    """Two tensor-parallel ranks, and two pipeline stages one after the other, compute what the whole model does."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_tiny_model(directory, family)
        model, _ = load(directory)
        hidden, cos_sin = torch.randn(4, model.hidden_size), torch.rand(4, 1, model.head_dim)
        with torch.inference_mode():
            expected = ModuleExecutor(model).run(hidden.clone(), cos_sin, attends_alone)
            passed = hidden.clone()
            for stage in range(2):
                part, _ = load(directory, Mesh.of_worker(stage, pp_size=2, tp_size=1))
                passed = FusedExecutor(part).run(passed, cos_sin, attends_alone)
        torch.testing.assert_close(passed, expected, atol=2e-5, rtol=2e-5)
        expected = torch.where(torch.arange(4)[:, None] == 2, torch.nan, expected)
        for rank in range(2):
            for got in run_ranks(directory, hidden, cos_sin, overflow_on=rank):
                torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5, equal_nan=True)


def main() -> None:
    # The interpreter truncates float32 to bfloat16, where a GPU rounds.
    tolerances = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
    kernels = LayerKernels(torch.device("cpu"), tolerances)
    for dtype in tolerances:
        for num_tokens, size in ((0, 8), (1, 1), (4, 64), (3, 100), (2, 2880)):
            kernels.check_add_norm(num_tokens, size, dtype)
            kernels.check_silu_mul(num_tokens, size, dtype)
        for heads in ((1, 1, 2), (9, 3, 64), (7, 1, 80), (14, 2, 128), (40, 8, 128)):
            for has_norm in (False, True):
                kernels.check_rotate_heads(7 if heads[0] < 10 else 3, heads, dtype, has_norm)
        kernels.check_rotate_heads(0, (4, 2, 16), dtype, has_norm=False)
    kernels.check_overflow()
    for family in FAMILIES:
        check_layers(family)
        check_ranks_and_stages(family)
    print("all equal")


if __name__ == "__main__":
    main()
