"""Attention with rows in prefix groups, against the reference without groups; merging two parts, by torch and by the
kernel, against float64 attention over random scores and values."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.examples import examples
from tests.model.attention.helpers import flashinfer_double
from tests.model.helpers.row_split_cases import NAMED_CASES, Case, CaseStep, cases
from tests.model.helpers.steps import CPU, one_thread
from tokasaurus.model.attention import row_split
from tokasaurus.model.attention.backend import KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.row_split import attend_rows, merge_partial
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.execution.device_batch import build_batch
from tokasaurus.model.staging.staging import ON_HOST


def attend(name: str, case: Case, grouped: bool) -> tuple[torch.Tensor, PagedLayout]:
    """-> output [T, H, D] with padding, and the layout built from the case's step."""
    made = CaseStep(case)
    backend = make_backend(name, case.shape, load_kernels())
    backend.allocate(made.num_blocks)
    backend.plan(PagedLayout(torch.arange(len(made.key)), ()))
    backend.write(made.key, made.value, 0)
    step = made.step if grouped else dataclasses.replace(made.step, groups=None)
    batch = build_batch(step, made.slots, case.page_size, ON_HOST)
    backend.plan(batch.layout)
    return attend_rows(backend, made.query[: len(batch.token_ids)], 0, batch.layout), batch.layout


def num_read(layout: PagedLayout) -> int:
    """KV tokens that attention reads for the segments of a layout."""
    parts = layout.parts if layout.prefix is None else (layout.prefix, *layout.parts)
    return sum(int(part.kv_lengths.sum()) for part in parts)


def check_grouped_attention(name: str, case: Case) -> None:
    with one_thread():
        expected, ungrouped = attend("reference", case, grouped=False)
    with nullcontext() if name == "cpu" else one_thread():
        output, layout = attend(name, case, grouped=True)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    num_prefix_tokens = [(case.num_common + group.num_blocks) * case.page_size for group in case.groups]
    num_saved = sum(
        (len(group.members) - 1) * count for group, count in zip(case.groups, num_prefix_tokens, strict=True)
    )
    assert num_read(ungrouped) - num_read(layout) == num_saved, "each prefix is read once for its group"


def test_attention_of_a_forward_asks_once_what_the_backend_is_and_may_leave_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For 5 layers: asking takes as long as several launches. Whoever needs no padding saves a launch a layer."""
    asked = []

    class Asked(type):
        def __instancecheck__(cls, instance: object) -> bool:
            asked.append(instance)
            return False

    class Never(metaclass=Asked):
        pass

    shape = KVShape(5, 4, 2, 8, 16, torch.float32, CPU)
    backend = make_backend("torch", shape, None)
    backend.allocate(3)
    rows = torch.tensor([0, 1, 2], dtype=torch.int32)
    part = PagedPart(0, 2, rows, torch.tensor([[1], [2]]), torch.ones(2, dtype=torch.int32), causal=True)
    layout = PagedLayout(torch.tensor([16, 32, 0]), (part,))
    backend.plan(layout)
    query, key = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    monkeypatch.setattr(row_split, "LayoutBackend", Never)
    for fills_padding in (True, False):
        asked.clear()
        attends = row_split.attends_over(backend, layout, fills_padding)
        for layer in range(5):
            output = torch.full_like(query, 7.0)
            attends(query, key, key, layer, output)
            torch.testing.assert_close(output[:2], key[:2].repeat_interleave(2, dim=1))  # of a token, its value
            assert (output[2] == (0 if fills_padding else 7)).all()
        assert len(asked) == 1


@examples(60)
@given(case=cases([16, 1, 5, 32]))
def test_grouped_attention_by_the_reference_equals_ungrouped_attention(case: Case) -> None:
    check_grouped_attention("reference", case)


@examples(80)
@given(case=cases([16, 1, 5, 32]))
def test_grouped_attention_by_torch_equals_ungrouped_attention(case: Case) -> None:
    check_grouped_attention("torch", case)


@examples(100)
@given(case=cases([16, 32]))
def test_rows_in_groups_attend_to_the_same_as_alone_by_the_kernels(case: Case) -> None:
    check_grouped_attention("cpu", case)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases([16, 1, 5]))
def test_grouped_attention_by_flashinfer_equals_ungrouped_attention(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its double; with caps and sinks, but no windows, with which it computes no groups."""
    flashinfer_double.install(monkeypatch, any_dtype=True)
    case = dataclasses.replace(case, window=None)
    check_grouped_attention("flashinfer", case)
    assert make_backend("flashinfer", case.shape_of(2), None).computes_groups
    assert not make_backend("flashinfer", dataclasses.replace(case, window=9).shape_of(2), None).computes_groups


@pytest.mark.parametrize("name", ["reference", "torch", "cpu"])
@pytest.mark.parametrize("case", NAMED_CASES)
def test_grouped_attention_of_named_cases_equals_ungrouped_attention(name: str, case: Case) -> None:
    check_grouped_attention(name, case)


@pytest.mark.parametrize("name", ["reference", "torch", "flashinfer"])
def test_grouped_rows_are_merged_where_the_next_layer_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy, beside rows in no group, a prompt and padding."""
    flashinfer_double.install(monkeypatch, any_dtype=True)
    made = CaseStep(NAMED_CASES[3])
    backend = make_backend(name, NAMED_CASES[3].shape, None)
    backend.allocate(made.num_blocks)
    backend.plan(PagedLayout(torch.arange(len(made.key)), ()))
    backend.write(made.key, made.value, 0)
    batch = build_batch(made.step, made.slots, 16, ON_HOST)
    backend.plan(batch.layout)
    output = torch.full((len(batch.token_ids) + 2, *made.query.shape[1:]), torch.nan)
    merge, merged = backend.merge, list[tuple[int, int]]()

    def noted(first: Part, second: Part, target: torch.Tensor) -> torch.Tensor:
        merged.append((target.data_ptr(), len(target)))
        return merge(first, second, target)

    backend.merge = noted
    with one_thread():
        attend_rows(backend, made.query[: len(output)], 0, batch.layout, output)
        expected, _ = attend("reference", NAMED_CASES[3], grouped=False)
    assert merged == [(output.data_ptr(), sum(len(group.members) for group in NAMED_CASES[3].groups))]
    torch.testing.assert_close(output[: len(expected)], expected, atol=1e-5, rtol=1e-5)
    assert (output[len(expected) :] == 0).all()


@pytest.mark.parametrize("grouped", [False, True])
def test_bfloat16_error_is_bounded_with_and_without_groups(grouped: bool) -> None:
    case = dataclasses.replace(NAMED_CASES[3], num_kv_heads=3, heads_per_kv_head=3, head_dim=64)
    expected, _ = attend("reference", case, grouped=False)
    output, _ = attend("cpu", dataclasses.replace(case, dtype=torch.bfloat16), grouped)
    error = (output.float() - expected).abs()
    assert error.mean() < 2e-3
    assert error.max() < 3e-2


Part = tuple[Tensor, Tensor]
Merge = Callable[[Part, Part, torch.dtype], Tensor]


def merge_by(name: str) -> Merge:
    """Into the middle of a larger tensor."""
    kernels = load_kernels()
    assert kernels is not None
    merge = merge_partial if name == "torch" else kernels.merge

    def call(first: Part, second: Part, dtype: torch.dtype) -> Tensor:
        num_rows, *sizes = first[0].shape
        whole = torch.full((num_rows + 2, *sizes), 7.0, dtype=dtype)
        merged = merge(first, second, whole[1 : num_rows + 1])
        assert merged.data_ptr() == whole[1:].data_ptr() or not num_rows
        assert (whole[[0, -1]] == 7).all()
        return merged

    return call


def attend_once(scores: Tensor, values: Tensor) -> Part:
    """scores [R, H, L], values [L, D] in float64 -> one part, float32."""
    return (scores.softmax(dim=-1) @ values).float(), scores.logsumexp(dim=-1).float()


@pytest.mark.parametrize("name", ["torch", "kernel"])
@examples(50)
@given(
    num_rows=st.sampled_from([0, 1, 7, 300]),
    head_dim=st.sampled_from([16, 80]),
    offsets=st.tuples(*(st.sampled_from([-1e4, -30.0, 0.0, 60.0, 1e4]),) * 2),
    seed=st.integers(0, 99),
)
def test_merged_parts_equal_attention_over_both(
    name: str, num_rows: int, head_dim: int, offsets: tuple[float, float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randn(num_rows, 3, 20, dtype=torch.float64, generator=generator) + offset for offset in offsets]
    values = [torch.randn(20, head_dim, dtype=torch.float64, generator=generator) for _ in range(2)]
    first, second = (attend_once(*part) for part in zip(scores, values, strict=True))
    expected, _ = attend_once(torch.cat(scores, dim=-1), torch.cat(values))
    merged = merge_by(name)(first, second, torch.float32)
    # At an lse of 1e4, float32 keeps three decimals.
    atol = 2e-6 * max(1.0, *map(abs, offsets))
    torch.testing.assert_close(merged, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["torch", "kernel"])
def test_a_part_that_a_row_does_not_see_adds_nothing(name: str) -> None:
    output = torch.randn(2, 3, 16)
    seen, unseen = torch.randn(2, 3), torch.full((2, 3), -torch.inf)
    merge = merge_by(name)
    unused = torch.full_like(output, 7.0)
    torch.testing.assert_close(merge((output, seen), (unused, unseen), torch.float32), output, atol=0, rtol=0)
    torch.testing.assert_close(merge((unused, unseen), (output, seen), torch.float32), output, atol=0, rtol=0)
    nothing = merge((unused, unseen), (output, unseen), torch.float32)
    torch.testing.assert_close(nothing, torch.zeros_like(output), atol=0, rtol=0)


@pytest.mark.parametrize("name", ["torch", "kernel"])
def test_only_the_result_is_rounded(name: str) -> None:
    parts = [(torch.randn(50, 3, 32), torch.randn(50, 3)) for _ in range(2)]
    merge = merge_by(name)
    exact = merge(parts[0], parts[1], torch.float32)
    rounded = merge(parts[0], parts[1], torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded, exact.bfloat16(), atol=0, rtol=0)
