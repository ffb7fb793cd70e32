"""An int8 KV cache: what it keeps, attention over it against float64, and how far that is from the original numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.helpers.examples import examples
from tests.model.helpers.paged_problems import CPU, Segment, fill_with_outliers, make_part, scattered_tables
from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.model.attention.backend import KVShape, PagedLayout, PagedPart, as_stored
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.cpu import CpuBackend
from tokasaurus.model.attention.row_split import attend_rows
from tokasaurus.model.cpu.bindings import load_kernels

NOTHING = torch.zeros(0, dtype=torch.int64)


def kept(x: torch.Tensor) -> NDArray[np.float64]:
    """[..., D] -> what the cache keeps of it, number by number."""
    rows = x.float().flatten(0, -2).tolist()
    found = []
    for row in rows:
        least = np.float32(max(map(abs, row))) / np.float32(127)
        scale = torch.tensor(float(least)).bfloat16()
        if float(scale) < least:  # rounded down: the next larger one
            scale = (scale.view(torch.int16) + 1).view(torch.bfloat16)
        step = float(scale)
        found.append(
            [0.0 if step == 0 else float(np.rint(np.float32(number) / np.float32(step))) * step for number in row]
        )
    return np.array(found).reshape(x.shape)


def attended(
    query: NDArray[np.float64],
    key: NDArray[np.float64],
    value: NDArray[np.float64],
    layer: AttentionSpec,
    sinks: list[float] | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """query [H, D] of the last of L tokens, key and value [L, K, D] -> output [H, D], lse [H], and the output for the
    magnitudes of the values, all in float64."""
    first = max(0, len(key) - (layer.window or len(key)))
    output, of_magnitudes = np.zeros(query.shape), np.zeros(query.shape)
    lse = np.zeros(len(query))
    for head, own in enumerate(query):
        kv_head = head * key.shape[1] // len(query)
        scores = key[first:, kv_head] @ own * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * np.tanh(scores / layer.softcap)
        all_scores = scores if sinks is None else np.append(scores, sinks[head])
        lse[head] = np.logaddexp.reduce(all_scores)
        weights = np.exp(scores - lse[head])
        output[head] = weights @ value[first:, kv_head]
        of_magnitudes[head] = weights @ np.abs(value[first:, kv_head])
    return output, lse, of_magnitudes


class Filled:
    """A backend with an int8 cache of one layer, whose blocks hold seeded random tokens of some segments."""

    def __init__(self, layer: AttentionSpec, page_size: int, lengths: list[int], seed: int, has_sinks: bool) -> None:
        self.layer = layer
        self.sinks = torch.linspace(-1, 2, layer.num_heads) if has_sinks else None
        shape = KVShape(
            *(1, layer.num_heads, layer.num_kv_heads, layer.head_dim, page_size, torch.int8, CPU, torch.bfloat16),
            *((layer,), (self.sinks,)),
        )
        self.backend = make_backend("cpu", shape, load_kernels())
        segments = [Segment(1, length) for length in lengths]
        self.tables, num_blocks = scattered_tables(segments, page_size, seed)
        self.backend.allocate(num_blocks)
        fill_with_outliers(self.backend, shape, num_blocks)
        self.generator = torch.Generator().manual_seed(seed)
        self.contents = []
        for length, table in zip(lengths, self.tables, strict=True):
            key, value = (self.numbers(length, layer.num_kv_heads, layer.head_dim) for _ in range(2))
            indices = torch.tensor(
                [table[token // page_size] * page_size + token % page_size for token in range(length)]
            )
            self.backend.plan(PagedLayout(indices, ()))
            self.backend.write(key, value, 0)
            self.contents.append((key, value))

    def numbers(self, *size: int) -> torch.Tensor:
        """bfloat16: the kernels do not round queries further."""
        return torch.randn(size, generator=self.generator).bfloat16()

    def check(
        self, query: torch.Tensor, found: torch.Tensor, lse: torch.Tensor | None, rows: list[tuple[int, int]]
    ) -> None:
        """query and found [rows, H, D]. rows: each row's segment, and how many tokens it sees."""
        kept_contents = [(kept(key), kept(value)) for key, value in self.contents]
        for row, (segment, visible) in enumerate(rows):
            key, value = (each[:visible] for each in kept_contents[segment])
            sinks = None if self.sinks is None else self.sinks.tolist()
            numbers = query[row].double().numpy()
            output, expected_lse, of_magnitudes = attended(numbers, key, value, self.layer, sinks)
            # Queries may be rounded to integers, their largest number to one of 127 * 256.
            of_scores = self.layer.scale * np.abs(numbers).max() * 2.0**-15.9 * np.abs(key).sum(-1).max(initial=0)
            # Softmax weights may be rounded to bfloat16, and so is the output where it is of that type.
            rounding = 2.0**-8 if found.dtype == torch.float32 else 2.0**-7
            error = np.abs(found[row].double().numpy() - output)
            assert (error <= (1.01 * rounding + 2 * of_scores) * of_magnitudes + 1e-5).all(), (row, error.max())
            if lse is not None:
                np.testing.assert_allclose(lse[row].numpy(), expected_lse, atol=2e-5 + of_scores, rtol=2e-5)


@st.composite
def layers(draw: st.DrawFn) -> AttentionSpec:
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 3, 5, 8, 16, 32]))
    head_dim = draw(st.sampled_from([16, 48, 64, 80, 128, 256]))
    window, softcap = draw(st.one_of(st.none(), st.integers(1, 200))), draw(st.sampled_from([None, 2.0, 30.0]))
    return AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, window=window, softcap=softcap)


@examples(60)
@given(
    layer=layers(),
    page_size=st.sampled_from([16, 32, 48]),
    segments=st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0, 1, 15, 16, 150])), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    has_sinks=st.booleans(),
    is_partial=st.booleans(),
)
def test_attention_is_that_over_what_the_cache_keeps(
    layer: AttentionSpec,
    page_size: int,
    segments: list[tuple[int, int]],
    seed: int,
    has_sinks: bool,
    is_partial: bool,
) -> None:
    """Decode rows, prompts and later chunks of prompts."""
    rows = [Segment(num_rows, num_rows + before) for num_rows, before in segments]
    filled = Filled(layer, page_size, [segment.kv_length for segment in rows], seed, has_sinks)
    part = make_part(rows, filled.tables, 0, causal=True, is_partial=is_partial)
    filled.backend.plan(PagedLayout(NOTHING, (part,)))
    query = filled.numbers(part.num_rows, layer.num_heads, layer.head_dim)
    output, lse = filled.backend.attend(query, 0, part)
    seen = [
        (index, visible)
        for index, segment in enumerate(rows)
        for visible in range(segment.kv_length - segment.num_rows + 1, segment.kv_length + 1)
    ]
    filled.check(query, output, lse, seen)


@pytest.mark.parametrize("window", [None, 20, 300])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_with_a_shared_prefix_see_what_they_see_alone(head_dim: int, window: int | None) -> None:
    """As one prefix group, and each row by itself: both against float64."""
    layer = AttentionSpec(6, 2, head_dim, head_dim**-0.5, window=window)
    num_shared, own_lengths = 64, [1, 3, 17, 200]
    filled = Filled(layer, 16, [num_shared + own for own in own_lengths], 3, has_sinks=True)
    first = filled.contents[0]
    filled.contents = [
        (torch.cat((first[0][:num_shared], key[num_shared:])), torch.cat((first[1][:num_shared], value[num_shared:])))
        for key, value in filled.contents
    ]
    num_blocks, count = num_shared // 16, len(own_lengths)
    tables = [filled.tables[0][:num_blocks] + table[num_blocks:] for table in filled.tables]
    alone = make_part([Segment(1, num_shared + own) for own in own_lengths], tables, 0, causal=True)
    after = [table[num_blocks:] for table in tables]
    suffix = make_part([Segment(1, own) for own in own_lengths], after, 0, causal=True, is_partial=True)
    prefix = PagedPart(
        *(0, count, torch.tensor([0, count], dtype=torch.int32)),
        torch.tensor([tables[0][:num_blocks]], dtype=torch.int32),
        *(torch.tensor([num_shared], dtype=torch.int32), False, True),
    )
    query = filled.numbers(count, layer.num_heads, head_dim)
    for layout in (PagedLayout(NOTHING, (alone,)), PagedLayout(NOTHING, (suffix,), prefix)):
        filled.backend.plan(layout)
        found = attend_rows(filled.backend, query, 0, layout)
        filled.check(query, found, None, [(row, num_shared + own) for row, own in enumerate(own_lengths)])


@pytest.mark.parametrize(
    "segments", [[Segment(1, 3000)], [Segment(70, 1500), Segment(1, 16)]], ids=["one row", "a chunk"]
)
def test_long_contexts_are_split_among_threads(segments: list[Segment]) -> None:
    layer = AttentionSpec(8, 2, 64, 0.125)
    filled = Filled(layer, 16, [segment.kv_length for segment in segments], 1, has_sinks=False)
    part = make_part(segments, filled.tables, 0, causal=True, is_partial=True)
    filled.backend.plan(PagedLayout(NOTHING, (part,)))
    query = filled.numbers(part.num_rows, 8, 64)
    output, lse = filled.backend.attend(query, 0, part)
    rows = [(i, seen) for i, s in enumerate(segments) for seen in range(s.kv_length - s.num_rows + 1, s.kv_length + 1)]
    assert lse is not None
    some = [*range(0, len(rows), 23), len(rows) - 1]
    filled.check(query[some], output[some], lse[some], [rows[index] for index in some])


def test_the_cache_keeps_codes_times_scales_of_each_token_and_head() -> None:
    """A row that sees one token returns its value, and its scores are its key's numbers. Also zeros, tiny and large
    numbers, one large among small ones, and a largest number that is a power of two or just above one."""
    layer = AttentionSpec(2, 2, 32, 1.0)
    filled = Filled(layer, 16, [40], 0, has_sinks=False)
    (table,) = filled.tables
    key, value = (torch.randn((40, 2, 32), generator=filled.generator) for _ in range(2))
    for x in (key, value):
        x[0], x[1], x[2] = 0, 1e-37 * x[1], 1e15 * x[2]
        x[3, :, 5], x[4], x[5, :, 0] = 1000, x[4] * 1e-5, 127
        x[6] = x[6].clamp(-1, 1)
        x[6, :, 0], x[7, :, 3] = 1, 127 * (1 + 2**-20)
    indices = torch.tensor([table[token // 16] * 16 + token % 16 for token in range(40)])
    filled.backend.plan(PagedLayout(indices, ()))
    filled.backend.write(key.float(), value.float(), 0)
    expected_key, expected_value = kept(key), kept(value)
    expected_key[1] = expected_value[1] = 0  # too small for a scale
    np.testing.assert_array_equal(as_stored(key, torch.int8).double().numpy(), expected_key)
    for token in range(40):
        # One token by a block table that begins with its block; those before it in the block are outside the window.
        part = make_part([Segment(1, token % 16 + 1)], [[table[token // 16]]], 0, causal=True, is_partial=True)
        shape = KVShape(1, 2, 2, 32, 16, torch.int8, CPU, torch.bfloat16, (AttentionSpec(2, 2, 32, 1.0, window=1),))
        backend = make_backend("cpu", shape, load_kernels())
        assert isinstance(backend, CpuBackend)
        assert isinstance(filled.backend, CpuBackend)
        backend._cache = filled.backend._cache
        backend.plan(PagedLayout(NOTHING, (part,)))
        for number in (0, 3, 5, 31):
            query = torch.nn.functional.one_hot(torch.tensor(number), 32).expand(1, 2, 32).bfloat16()
            output, lse = backend.attend(query, 0, part)
            np.testing.assert_array_equal(output[0].double().numpy(), expected_value[token])
            np.testing.assert_allclose(lse[0].double().numpy(), expected_key[token, :, number], rtol=1e-6)


def test_the_error_against_the_original_numbers_is_that_of_eight_bits() -> None:
    """Of normal numbers: a code is off by 0.29 of a step in the mean square, and a step is about 3 / 127 of a standard
    deviation at head size 128. Scores of standard deviation 1 err by 0.29 * 3 / 127, as outputs do."""
    layer = AttentionSpec(8, 2, 128, 128**-0.5)
    filled = Filled(layer, 16, [500] * 4, 5, has_sinks=False)
    part = make_part([Segment(1, 500)] * 4, filled.tables, 0, causal=True, is_partial=True)
    filled.backend.plan(PagedLayout(NOTHING, (part,)))
    query = filled.numbers(4, 8, 128)
    output, lse = filled.backend.attend(query, 0, part)
    assert lse is not None
    for row, (key, value) in enumerate(filled.contents):
        exact, exact_lse, _ = attended(
            query[row].double().numpy(), key.double().numpy(), value.double().numpy(), layer, None
        )
        error = np.sqrt(np.square(output[row].double().numpy() - exact).mean() / np.square(exact).mean())
        assert 1e-4 < error < 2.5 * 0.29 * 3 / 127
        assert np.abs(lse[row].double().numpy() - exact_lse).max() < 0.29 * 3 / 127


def test_a_cache_takes_about_half_the_memory_of_one_of_16_bits() -> None:
    for head_dim, least in ((64, 1.93), (128, 1.96), (256, 1.98)):
        of_int8, of_half = (
            KVShape(2, 8, 2, head_dim, 16, dtype, CPU, torch.bfloat16) for dtype in (torch.int8, torch.float16)
        )
        assert least < of_half.bytes_per_block / of_int8.bytes_per_block < 2
        backend = make_backend("cpu", of_int8, load_kernels())
        backend.allocate(10)
        assert sum(cache.nbytes for cache in backend.caches) == 10 * of_int8.bytes_per_block
        assert of_int8.bytes_per_block == 2 * 2 * 2 * 16 * (head_dim + 2)


@pytest.mark.parametrize(
    ("name", "head_dim", "reason"),
    [
        ("torch", 64, "only the CPU kernels have it, not attention_backend=torch"),
        ("reference", 64, "only the CPU kernels have it, not attention_backend=reference"),
        (None, 24, "the CPU kernels do not support head size 24"),
    ],
)
def test_backends_that_have_no_int8_cache_refuse_it(name: str | None, head_dim: int, reason: str) -> None:
    shape = KVShape(1, 2, 1, head_dim, 16, torch.int8, CPU, torch.bfloat16)
    with pytest.raises(ValueError, match=f"kv_cache_dtype=int8: {reason}"):
        make_backend(name, shape, load_kernels())
    with pytest.raises(
        ValueError, match="kv_cache_dtype=int8: it needs the CPU kernels, which cpu_isa=torch turns off"
    ):
        make_backend(None, shape, None)
