"""The batched backends against the reference, which computes one row at a time; the reference against torch."""

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.model.helpers.paged_problems import CPU, Segment, attend_all, fill, make_part
from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.model.attention import torch_backend
from tokasaurus.model.attention.backend import KVShape, PagedLayout
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.buffer_sizes import LayerPlace
from tokasaurus.model.cpu.bindings import load_kernels


@st.composite
def problems(draw: st.DrawFn) -> tuple[KVShape, list[Segment], bool, int]:
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 3, 5, 7, 8, 32]))
    head_dim = draw(st.sampled_from([16, 32, 64, 80, 128, 256]))
    layer = st.builds(
        lambda factor, window, softcap: AttentionSpec(
            num_heads, num_kv_heads, head_dim, factor * head_dim**-0.5, window=window, softcap=softcap
        ),
        st.sampled_from([1, 0.5, 2]),
        st.one_of(st.none(), st.integers(1, 400)),
        st.sampled_from([None, 1, 50]),
    )
    shape = KVShape(
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=draw(st.one_of(st.just(()), st.tuples(layer, layer))),
        sinks=draw(st.sampled_from([(), (None, torch.linspace(-2, 3, num_heads))])),
        page_size=draw(st.sampled_from([16, 32, 48])),
        dtype=torch.float32,
        device=CPU,
    )
    segment = st.builds(
        lambda rows, before: Segment(rows, rows + before), st.integers(1, 40), st.sampled_from([0, 1, 15, 16, 100, 300])
    )
    return shape, draw(st.lists(segment, min_size=1, max_size=5)), draw(st.booleans()), draw(st.integers(0, 99))


@pytest.mark.parametrize("name", ["cpu", "torch"])
@examples(100)
@given(problem=problems())
def test_ragged_batches_equal_the_reference(name: str, problem: tuple[KVShape, list[Segment], bool, int]) -> None:
    shape, segments, causal, seed = problem
    output, lse = attend_all(name, shape, segments, causal, layer=1, seed=seed)
    expected_output, expected_lse = attend_all("reference", shape, segments, causal, layer=1, seed=seed)
    torch.testing.assert_close(output, expected_output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@examples(60)
@given(problem=problems())
def test_ragged_batches_in_bfloat16_are_near_the_reference(
    problem: tuple[KVShape, list[Segment], bool, int],
) -> None:
    """Products of bfloat16 numbers are summed in float32; softmax weights and outputs are rounded."""
    shape, segments, causal, seed = problem
    shape = replace(shape, dtype=torch.bfloat16)
    output, lse = attend_all("cpu", shape, segments, causal, layer=1, seed=seed)
    expected_output, expected_lse = attend_all("reference", shape, segments, causal, layer=1, seed=seed)
    torch.testing.assert_close(output, expected_output, atol=0.03, rtol=2**-7)
    torch.testing.assert_close(lse, expected_lse, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("name", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_layers_with_blocks_of_their_own_equal_those_without(name: str, dtype: torch.dtype) -> None:
    """Six layers in four groups, of which the first and the last have one layer."""
    if dtype == torch.int8 and name != "cpu":
        pytest.skip("only the CPU kernels have int8 caches")
    windows = (20, None, 20, 20, 33, None)
    layers = tuple(AttentionSpec(6, 2, 64, 0.125, window=window) for window in windows)
    segments = [Segment(1, 300), Segment(40, 150), Segment(3, 3), Segment(70, 71), Segment(1, 33)]
    fields: dict[str, Any] = {"activation_dtype": torch.float32, "layers": layers}
    shape = KVShape(6, 6, 2, 64, 16, dtype, CPU, **fields)
    numbers = [(1, 0), (0, 0), (2, 0), (2, 1), (3, 0), (0, 1)]
    places = tuple(LayerPlace(*place) for place in numbers)
    apart = replace(shape, places=places, num_groups=3, block_layers=2)
    assert 3 * apart.bytes_per_block == shape.bytes_per_block
    for layer in range(6):
        found = attend_all(name, apart, segments, True, layer, seed=layer)
        torch.testing.assert_close(found, attend_all(name, shape, segments, True, layer, seed=layer))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "segments",
    [[Segment(1, 3000)], [Segment(70, 1500), Segment(1, 16)], [Segment(1, 2500), *[Segment(2, 40)] * 30]],
    ids=["one row", "a chunk", "many and one"],
)
def test_long_contexts_split_among_threads_equal_the_reference(segments: list[Segment], causal: bool) -> None:
    """Long enough for the CPU kernel to split them into partitions for its threads and merge the results."""
    shape = KVShape(1, 6, 2, 64, 16, torch.float32, CPU)
    result = attend_all("cpu", shape, segments, causal, layer=0, seed=5)
    expected = attend_all("reference", shape, segments, causal, layer=0, seed=5)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_bfloat16_error_is_within_its_rounding(name: str) -> None:
    segments = [Segment(1, 600), Segment(1, 33), Segment(70, 200)]
    outputs = {}
    for dtype in (torch.bfloat16, torch.float32):
        shape = KVShape(1, 9, 3, 64, 16, dtype, CPU)
        outputs[dtype], _ = attend_all(name if dtype == torch.bfloat16 else "reference", shape, segments, True, 0, 3)
    error = (outputs[torch.bfloat16].float() - outputs[torch.float32]).abs()
    assert error.mean() < 2e-3
    assert error.max() < 3e-2


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_a_float16_cache_beside_float32_activations_equals_the_reference(name: str) -> None:
    segments = [Segment(1, 600), Segment(1, 33), Segment(70, 200)]
    shape = KVShape(1, 9, 3, 64, 16, torch.float16, CPU, activation_dtype=torch.float32)
    result = attend_all(name, shape, segments, True, 0, 3)
    torch.testing.assert_close(result, attend_all("reference", shape, segments, True, 0, 3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["cpu", "torch", "reference"])
def test_a_float16_cache_rounds_as_torch_does_and_stays_finite(name: str, dtype: torch.dtype) -> None:
    """A row that attends to one token returns the value of that token. dtype: of the activations."""
    shape = KVShape(1, 1, 1, 64, 16, torch.float16, CPU, activation_dtype=dtype)
    backend = make_backend(name, shape, load_kernels())
    backend.allocate(2)
    values = torch.tensor([1e6, -7e4, 65504.0, 65519.0, 1e-8, 3e-8, 6e-5, -0.0])
    value = torch.cat((values, torch.randn(56))).view(1, 1, 64).to(dtype)
    part = make_part([Segment(1, 1)], [[1]], first_row=0, causal=True)
    backend.plan(PagedLayout(torch.tensor([16]), (part,)))
    backend.write(torch.full((1, 1, 64), 1e6, dtype=dtype), value, 0)
    output, _ = backend.attend(torch.zeros(1, 1, 64, dtype=dtype), 0, part)
    torch.testing.assert_close(output, value.float().clamp(-65504, 65504).half().to(dtype), atol=0, rtol=0)


def test_the_reference_is_scaled_dot_product_attention() -> None:
    shape = KVShape(1, 4, 2, 16, 16, torch.float32, CPU)
    backend = make_backend("reference", shape, None)
    backend.allocate(4)
    key, value = torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    table = [3, 1, 2]
    kv_indices = torch.tensor([table[t // 16] * 16 + t % 16 for t in range(40)])
    backend.plan(PagedLayout(kv_indices, ()))
    backend.write(key, value, 0)
    query = torch.randn(40, 4, 16)
    output, _ = backend.attend(query, 0, make_part([Segment(40, 40)], [table], 0, causal=True))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (query, key, value)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["cpu", "torch", "reference"])
def test_parts_merged_by_their_lse_equal_attention_over_both(name: str) -> None:
    """A segment's blocks are split in two: a prefix that every row sees whole, and a causal rest."""
    shape = KVShape(1, 6, 3, 32, 16, torch.float32, CPU)
    backend = make_backend(name, shape, load_kernels())
    backend.allocate(9)
    table = [4, 2, 7, 1, 8]
    fill(backend, shape, [Segment(1, 70)], [table])
    query = torch.randn(5, 6, 32)
    both = make_part([Segment(5, 70)], [table], 0, causal=True)
    prefix = make_part([Segment(5, 48)], [table[:3]], 0, causal=False)
    suffix = make_part([Segment(5, 22)], [table[3:]], 0, causal=True)
    results = []
    for part in (both, prefix, suffix):
        backend.plan(PagedLayout(torch.zeros(0, dtype=torch.int64), (part,)))
        results.append(backend.attend(query, 0, part))
    (expected, expected_lse), first, second = results
    torch.testing.assert_close(torch.logaddexp(first[1], second[1]), expected_lse, atol=1e-5, rtol=1e-5)
    merged = backend.merge(first, second, torch.empty_like(first[0]))
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["cpu", "torch", "reference"])
def test_two_parts_of_one_layout_may_have_the_same_rows(name: str) -> None:
    shape = KVShape(1, 2, 1, 16, 16, torch.float32, CPU)
    backend = make_backend(name, shape, load_kernels())
    backend.allocate(5)
    table = [3, 1, 2, 4]
    fill(backend, shape, [Segment(1, 60)], [table])
    parts = tuple(make_part([Segment(3, 30)], [table[i : i + 2]], 0, causal=False) for i in (0, 2))
    query = torch.randn(3, 2, 16)
    alone = []
    for part in parts:
        backend.plan(PagedLayout(torch.zeros(0, dtype=torch.int64), (part,)))
        alone.append(backend.attend(query, 0, part)[0])
    backend.plan(PagedLayout(torch.zeros(0, dtype=torch.int64), parts))
    together = [backend.attend(query, 0, part)[0] for part in parts]
    torch.testing.assert_close(together, alone, atol=0, rtol=0)
    assert not torch.allclose(alone[0], alone[1])


@pytest.mark.parametrize("name", ["cpu", "torch", "reference"])
def test_the_output_of_a_partial_part_is_float32(name: str) -> None:
    shape = KVShape(1, 2, 1, 16, 16, torch.bfloat16, CPU)
    backend = make_backend(name, shape, load_kernels())
    backend.allocate(3)
    fill(backend, shape, [Segment(1, 30)], [[2, 1]])
    query = torch.randn(3, 2, 16).bfloat16()
    outputs = []
    for is_partial in (False, True):
        part = replace(make_part([Segment(3, 30)], [[2, 1]], 0, causal=True), is_partial=is_partial)
        backend.plan(PagedLayout(torch.zeros(0, dtype=torch.int64), (part,)))
        outputs.append(backend.attend(query, 0, part)[0])
    assert [output.dtype for output in outputs] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(outputs[1].bfloat16(), outputs[0], atol=0, rtol=0)


def test_a_named_backend_that_cannot_serve_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="head size 24"):
        make_backend("cpu", KVShape(1, 2, 1, 24, 16, torch.float32, CPU), load_kernels())
    with pytest.raises(ValueError, match="page_size=8"):
        make_backend("cpu", KVShape(1, 2, 1, 16, 8, torch.float32, CPU), load_kernels())
    with pytest.raises(ValueError, match="cpu_isa=torch"):
        make_backend("cpu", KVShape(1, 2, 1, 16, 16, torch.float32, CPU), None)


def test_small_memory_bounds_split_batches_and_rows_without_changing_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill of 90 rows is split into chunks, and decode rows are gathered a few at a time."""
    shape = KVShape(2, 6, 3, 32, 16, torch.float32, CPU)
    segments = [Segment(90, 150), *(Segment(1, length) for length in (400, 390, 380, 30, 20))]
    expected = attend_all("reference", shape, segments, True, layer=1, seed=4)
    monkeypatch.setattr(torch_backend, "_MAX_SCORES", 10_000)
    monkeypatch.setattr(torch_backend, "_MAX_GATHERED", 50_000)
    for result, reference in zip(attend_all("torch", shape, segments, True, 1, 4), expected, strict=True):
        torch.testing.assert_close(result, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("num_rows", [1, 100], ids=["decode", "prefill"])
def test_time_of_a_layer_with_a_window_does_not_grow_with_the_context(name: str, num_rows: int) -> None:
    """Without the window, the longest context takes 30 times as long. The shortest of some runs counts, in turns."""
    layer = AttentionSpec(6, 2, 64, 0.125, window=256)
    shape = KVShape(1, 6, 2, 64, 16, torch.float32, CPU, layers=(layer,))
    backend = make_backend(name, shape, load_kernels())
    backend.allocate(2001)
    query, blocks = torch.randn(8 * num_rows, 6, 64), list(range(1, 2001))
    seconds = dict.fromkeys((1000, 8000, 32000), math.inf)
    for _ in range(6):
        for length in seconds:
            part = make_part([Segment(num_rows, length)] * 8, [blocks] * 8, 0, causal=True)
            start = time.perf_counter()
            backend.plan(PagedLayout(torch.zeros(0, dtype=torch.int64), (part,)))
            backend.attend(query, 0, part)
            seconds[length] = min(seconds[length], time.perf_counter() - start)
    assert max(seconds.values()) < 4 * seconds[1000]
