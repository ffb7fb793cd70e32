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
from tests.model.helpers.greedy_decoding import load
from tokasaurus.model.decoder import triton_layers
from tokasaurus.model.decoder.layers import linear
from tokasaurus.model.execution import executors
from tokasaurus.model.execution.executors import FusedExecutor, ModuleExecutor
from tokasaurus.model.parallel.mesh import Mesh

# The interpreter truncates float32 to bfloat16, where a GPU rounds.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(got: Tensor, expected: Tensor) -> None:
    """expected: float64."""
    limit = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=limit, rtol=limit, equal_nan=True)


def with_gaps(tensor: Tensor) -> Tensor:
    """The same rows, further apart."""
    wide = tensor.new_full((len(tensor), tensor.shape[1] + 5), torch.nan)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def check_add_norm(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    hidden, addend = (with_gaps(torch.randn(num_tokens, size, generator=generator).to(dtype)) for _ in range(2))
    weight = torch.rand(size, generator=generator).to(dtype)
    before = hidden.clone()
    close(triton_layers.add_norm(hidden, None, weight, 1e-5), normed(before.double(), weight, 1e-5))
    assert torch.equal(hidden, before)
    poison = torch.zeros(num_tokens)
    poison[1::3] = torch.nan
    for given in (None, poison):
        total = hidden.clone()
        got = triton_layers.add_norm(total, addend, weight, 1e-2, given)
        expected = before.double() + addend.double()
        if given is not None:
            expected += given.double()[:, None]
        close(total, expected)
        close(got, normed(total.double(), weight, 1e-2))


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """As complex numbers: float64 [T, heads, D]."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos_sin[..., :half], cos_sin[..., half:])
    return torch.cat((turned.real, turned.imag), -1)


def check_rotate_heads(num_tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, has_norm: bool) -> None:
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(num_heads)
    features = with_gaps(
        torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    )
    angles = torch.rand(num_tokens, 1, head_dim // 2, generator=generator) * 9
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    weights = tuple(torch.rand(head_dim, generator=generator).to(dtype) for _ in range(2)) if has_norm else None
    broken = {2: (num_heads * head_dim, torch.nan), 5: (features.shape[1] - 1, -torch.inf)}
    for token, (column, number) in broken.items():
        if token < num_tokens:
            features[token, column] = number
    before = features.clone()
    query, key, value, poison = triton_layers.rotate_heads(features, cos_sin, num_heads, num_kv_heads, weights, 1e-5)
    assert torch.equal(features.nan_to_num(7), before.nan_to_num(7))
    by_head = before.double().unflatten(1, (-1, head_dim))
    own_query, own_key, own_value = by_head.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if weights is not None:
        own_query, own_key = normed(own_query, weights[0], 1e-5), normed(own_key, weights[1], 1e-5)
    own_query, own_key, own_value = rotated(own_query, cos_sin.double()), rotated(own_key, cos_sin.double()), own_value
    is_broken = torch.tensor([token in broken for token in range(num_tokens)], dtype=torch.bool)
    assert torch.equal(poison.isnan(), is_broken)
    assert not poison[~is_broken].any()
    own_key[is_broken], own_value = 0, own_value.clone()
    own_value[is_broken] = 0
    close(query, own_query)
    close(key, own_key)
    assert torch.equal(value.double(), own_value)


def check_silu_mul(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = with_gaps((torch.randn(num_tokens, 2 * size, generator=torch.Generator().manual_seed(1)) * 4).to(dtype))
    gate, up = gate_up.double().chunk(2, -1)
    close(triton_layers.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)


def check_overflow() -> None:
    """A key that float16 cannot hold once it is rotated counts as not finite."""
    features = torch.full((1, 6), 60_000.0, dtype=torch.float16)
    angle = torch.tensor(-torch.pi / 4)
    cos_sin = torch.stack((angle.cos(), angle.sin())).reshape(1, 1, 2)
    _, key, value, poison = triton_layers.rotate_heads(features, cos_sin, 1, 1)
    assert poison.isnan().all()
    assert not key.any()
    assert not value.any()


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

        def attends(query: Tensor, key: Tensor, value: Tensor, _layer: int, _output: Tensor | None = None) -> Tensor:
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


def attends_alone(query: Tensor, key: Tensor, value: Tensor, _layer: int, _output: Tensor | None = None) -> Tensor:
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
            next(iter(model.decoder_layers())).attention.qkv.register_forward_hook(break_token)

    def run(executor: FusedExecutor) -> Tensor:
        with torch.inference_mode():
            return executor.run(hidden.clone(), cos_sin, attends_alone)

    with patch.object(linear, "sum_over_shards", summed), concurrent.futures.ThreadPoolExecutor(2) as pool:
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
    for dtype in TOLERANCES:
        for num_tokens, size in ((0, 8), (1, 1), (4, 64), (3, 100), (2, 2880)):
            check_add_norm(num_tokens, size, dtype)
            check_silu_mul(num_tokens, size, dtype)
        for heads in ((1, 1, 2), (9, 3, 64), (7, 1, 80), (14, 2, 128), (40, 8, 128)):
            for has_norm in (False, True):
                check_rotate_heads(7 if heads[0] < 10 else 3, heads, dtype, has_norm)
        check_rotate_heads(0, (4, 2, 16), dtype, has_norm=False)
    check_overflow()
    for family in FAMILIES:
        check_layers(family)
        check_ranks_and_stages(family)
    print("all equal")


if __name__ == "__main__":
    main()
