"""Scales, windows and caps of the scores, layer by layer, against attention in float64 over each row's own tokens."""

import math
import random

import pytest
import torch

from tests.helpers.examples import few
from tests.model.attention.helpers import flashinfer_double
from tests.model.helpers.paged_problems import Segment, attend_all, make_part, scattered_tables
from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.model.attention import flashinfer_backend
from tokasaurus.model.attention.backend import AttentionBackend, KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.choose import candidates, make_backend
from tokasaurus.model.attention.cpu import CpuBackend
from tokasaurus.model.attention.row_split import attend_rows
from tokasaurus.model.attention.torch_backend import TorchBackend
from tokasaurus.model.cpu.bindings import load_kernels

CPU = torch.device("cpu")
H, K, D, P = 4, 2, 16, 16


def random_layer(rng: random.Random) -> AttentionSpec:
    scale = rng.choice([D**-0.5, 0.1, 0.7])
    window = rng.choice([None, 1, 5, 16, 33, 100])
    return AttentionSpec(H, K, D, scale, window=window, softcap=rng.choice([None, 2.0, 30.0]))


def random_chunks(rng: random.Random) -> AttentionSpec:
    return AttentionSpec(H, K, D, D**-0.5, chunk=rng.choice([1, 5, 16, 33, 100]), softcap=rng.choice([None, 2.0]))


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: AttentionSpec) -> torch.Tensor:
    """query [H, D] of the last of L tokens, key and value [L, K, D] -> [H, D], in float64."""
    length = len(key)
    out = []
    for head in range(H):
        before = range(length) if layer.chunk is None else [t for t in range(length) if t % layer.chunk == 0][-1:]
        seen = range(max(before[0], length - (layer.window or length)), length)
        scores = [float(query[head].double() @ key[token, head * K // H].double()) * layer.scale for token in seen]
        if layer.softcap is not None:
            scores = [layer.softcap * math.tanh(score / layer.softcap) for score in scores]
        weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
        out.append(weights @ value[seen.start :, head * K // H].double())
    return torch.stack(out)


def filled(name: str, layers: list[AttentionSpec], segments: list[Segment], seed: int) -> tuple[AttentionBackend, list]:  # type: ignore[type-arg]
    """A backend whose cache has seeded random keys and values of the segments, with these and the segments' tables."""
    shape = KVShape(len(layers), H, K, D, P, torch.float32, CPU, layers=tuple(layers))
    backend = make_backend(name, shape, load_kernels())
    tables, num_blocks = scattered_tables(segments, P, seed)
    backend.allocate(num_blocks)
    generator = torch.Generator().manual_seed(seed)
    contents = []
    for segment, table in zip(segments, tables, strict=True):
        indices = torch.tensor([table[t // P] * P + t % P for t in range(segment.kv_length)])
        key, value = torch.randn((2, segment.kv_length, K, D), generator=generator)
        backend.plan(PagedLayout(indices, ()))
        for layer in range(len(layers)):
            backend.write(key, value, layer)
        contents.append((key, value))
    return backend, [contents, tables]


@pytest.mark.parametrize("name", ["cpu", "torch", "reference", "flashinfer"])
@few(6, "seed", range(12))
def test_rows_see_their_windows_or_chunks_with_capped_and_scaled_scores(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flashinfer_double.install(monkeypatch, any_dtype=True)
    rng = random.Random(seed)
    layers = [random_layer(rng) for _ in range(3)]
    if name != "flashinfer":  # see the next test
        layers += [random_chunks(rng) for _ in range(2)]
    lengths = [rng.choice([1, 16, 17, 40, 150]) for _ in range(5)]
    segments = [Segment(rng.randint(1, min(length, 40)), length) for length in lengths]
    backend, (contents, tables) = filled(name, layers, segments, seed)
    part = make_part(segments, tables, 0, True, False)
    layout = PagedLayout(torch.zeros(0, dtype=torch.int64), (part,))
    backend.plan(layout)
    query = 3 * torch.randn((part.num_rows, H, D), generator=torch.Generator().manual_seed(seed))
    for index, layer in enumerate(layers):
        found = attend_rows(backend, query, index, layout)
        row = 0
        for segment, (key, value) in zip(segments, contents, strict=True):
            for visible in range(segment.kv_length - segment.num_rows + 1, segment.kv_length + 1):
                own = expected(query[row], key[:visible], value[:visible], layer)
                torch.testing.assert_close(found[row].double(), own, atol=1e-5, rtol=1e-5)
                row += 1


def test_flashinfer_refuses_chunks() -> None:
    layers = AttentionSpec(H, K, 64, 0.1), AttentionSpec(H, K, 64, 0.1, chunk=16)
    shape = KVShape(2, H, K, 64, P, torch.float16, torch.device("cuda"), layers=layers)
    assert flashinfer_backend.why_unfit(shape) == "it computes no attention within chunks"


@pytest.mark.parametrize("name", ["cpu", "torch", "reference"])
@few(6, "seed", range(12))
def test_a_window_of_a_prefix_group_begins_in_the_prefix_or_behind_it(name: str, seed: int) -> None:
    rng = random.Random(seed)
    layers = [random_layer(rng) for _ in range(4)]
    num_shared = P * rng.randint(1, 4)
    own_lengths = [rng.choice([1, 3, 16, 40, 120]) for _ in range(4)]
    segments = [Segment(1, num_shared + own) for own in own_lengths]
    backend, (contents, tables) = filled(name, layers, segments, seed)
    # All rows see the first one's prefix.
    contents = [
        tuple(torch.cat((contents[0][each][:num_shared], content[each][num_shared:])) for each in (0, 1))
        for content in contents
    ]
    num_blocks = num_shared // P
    count = len(segments)
    suffix = make_part(
        [Segment(1, own) for own in own_lengths], [table[num_blocks:] for table in tables], 0, True, True
    )
    prefix = PagedPart(
        *(0, count, torch.tensor([0, count], dtype=torch.int32)),
        torch.tensor([tables[0][:num_blocks]], dtype=torch.int32),
        *(torch.tensor([num_shared], dtype=torch.int32), False, True),
    )
    layout = PagedLayout(torch.zeros(0, dtype=torch.int64), (suffix,), prefix)
    backend.plan(layout)
    query = 3 * torch.randn((count, H, D), generator=torch.Generator().manual_seed(seed))
    for index, layer in enumerate(layers):
        found = attend_rows(backend, query, index, layout)
        for row, (key, value) in enumerate(contents):
            own = expected(query[row], key, value, layer)
            torch.testing.assert_close(found[row].double(), own, atol=1e-5, rtol=1e-5)


def test_a_window_reads_only_the_blocks_that_it_touches() -> None:
    layers = [AttentionSpec(H, K, D, D**-0.5, window=20), AttentionSpec(H, K, D, D**-0.5)]
    segments = [Segment(1, 500), Segment(1, 180)]
    backend, (_, tables) = filled("torch", layers, segments, 0)
    assert isinstance(backend, TorchBackend)
    part = make_part(segments, tables, 0, True, False)
    backend.plan(PagedLayout(torch.zeros(0, dtype=torch.int64), (part,)))
    read = {window: sum(len(b.block_table) for b in backend._buckets[id(part), window, 0]) for window in (20, None)}
    assert read[20] <= 2 * 3
    assert read[None] >= 500 // P


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_the_kernels_read_no_block_before_a_window(num_rows: int) -> None:
    """These blocks are NaN, which a weight of 0 would keep."""
    layers = [AttentionSpec(H, K, D, D**-0.5, window=20), AttentionSpec(H, K, D, D**-0.5)]
    segments = [Segment(num_rows, 500), Segment(num_rows, 181)]
    backend, (contents, tables) = filled("cpu", layers, segments, 0)
    for segment, table in zip(segments, tables, strict=True):
        first_seen = segment.kv_length - num_rows + 1 - 20
        for cache in backend.caches:
            cache[:, table[: first_seen // P]] = torch.nan
    part = make_part(segments, tables, 0, True, False)
    layout = PagedLayout(torch.zeros(0, dtype=torch.int64), (part,))
    backend.plan(layout)
    query = torch.randn((part.num_rows, H, D), generator=torch.Generator().manual_seed(0))
    found = attend_rows(backend, query, 0, layout)
    for row, ((key, value), segment) in enumerate(zip(contents, segments, strict=True)):
        last = (row + 1) * num_rows - 1
        own = expected(query[last], key, value, layers[0])
        torch.testing.assert_close(found[last].double(), own, atol=1e-5, rtol=1e-5)
        assert found[last - segment.num_rows + 1].isfinite().all()
    assert attend_rows(backend, query, 1, layout).isnan().all(), "all blocks are read without a window"


@pytest.mark.parametrize("window", [7, 128, 1000, 2999, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_every_kind_of_cache_in_contexts_that_threads_share(dtype: torch.dtype, window: int) -> None:
    layer = AttentionSpec(6, 2, 64, 0.3, window=window, softcap=5.0)
    activation_dtype = {torch.float16: torch.float32, torch.int8: torch.bfloat16}.get(dtype)
    shape = KVShape(1, 6, 2, 64, 32, dtype, CPU, activation_dtype, (layer,))
    segments = [Segment(1, 3000), Segment(70, 1500), Segment(2, 33)]
    found = attend_all("cpu", shape, segments, True, 0, 1)
    wanted = attend_all("reference", shape, segments, True, 0, 1)
    # With bfloat16 dot products, weights are rounded too.
    error = 2**-6 if dtype in (torch.bfloat16, torch.int8) else 1e-5
    torch.testing.assert_close(found, wanted, atol=error, rtol=error)


def test_the_fast_backends_take_such_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (AttentionSpec(H, K, D, 0.1, window=20, softcap=2.0),)
    shape = KVShape(1, H, K, D, P, torch.float32, CPU, layers=layers)
    assert isinstance(make_backend(None, shape, load_kernels()), CpuBackend)
    on_gpu = KVShape(1, H, K, 64, P, torch.bfloat16, torch.device("cuda"), layers=layers, sinks=(torch.zeros(H),))
    monkeypatch.setattr(flashinfer_backend.importlib.util, "find_spec", lambda _name: True)
    assert [candidate.name for candidate in candidates(None, on_gpu, None)] == ["flashinfer", "torch"]
