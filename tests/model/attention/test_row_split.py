"""Attention with rows in prefix groups, against the reference without groups."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings

from tests.model.attention.helpers import flashinfer_double
from tests.model.helpers.row_split_cases import NAMED_CASES, Case, CaseStep, cases
from tests.model.helpers.steps import one_thread
from tokasaurus.model.attention.backend import PagedLayout
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.row_split import attend_rows
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.execution.device_batch import build_batch
from tokasaurus.model.staging.staging import ON_HOST

Part = tuple[torch.Tensor, torch.Tensor]


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


@settings(max_examples=60)
@given(case=cases([16, 1, 5, 32]))
def test_grouped_attention_by_the_reference_equals_ungrouped_attention(case: Case) -> None:
    check_grouped_attention("reference", case)


@settings(max_examples=80)
@given(case=cases([16, 1, 5, 32]))
def test_grouped_attention_by_torch_equals_ungrouped_attention(case: Case) -> None:
    check_grouped_attention("torch", case)


@settings(max_examples=100)
@given(case=cases([16, 32]))
def test_rows_in_groups_attend_to_the_same_as_alone_by_the_kernels(case: Case) -> None:
    check_grouped_attention("cpu", case)


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
