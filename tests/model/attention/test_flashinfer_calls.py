"""Calls that are learnt from a wrapper are those that the wrapper makes. The real ones: tests/check_flashinfer.py."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.attention.helpers.flashinfer_real import decode_part, prompts_part
from tests.model.helpers.paged_problems import CPU
from tokasaurus.model.attention.backend import BlockLists, KVShape, PagedPart
from tokasaurus.model.attention.flashinfer_calls import UnknownCallError, learn_calls, learn_plan

SHAPE = KVShape(1, 4, 2, 8, 16, torch.bfloat16, CPU)
CACHE = torch.zeros(9), torch.zeros(9)


class Wrapper:
    """Hands its arguments on in an order of its own."""

    def __init__(self, seed: int, further: Callable[[PagedPart], dict[str, Any]] = lambda _part: {}) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self._int_workspace_buffer, self._pin_memory_int_workspace_buffer = torch.zeros(3), torch.zeros(3)
        self._workspace = torch.zeros(1000)
        self._random, self._further = random.Random(seed), further
        self._orders: dict[str, list[str]] = {}
        self._cached_module = SimpleNamespace(plan=self._planned, paged_run=self._ran)

    def _planned(self, *arguments: Any) -> list[int]:
        self.heard.append(arguments)
        return [len(self.heard)]

    def _ran(self, *arguments: Any) -> None:
        self.heard.append(arguments)

    def _ordered(self, name: str, arguments: dict[str, Any]) -> list[Any]:
        if name not in self._orders:
            self._orders[name] = self._random.sample(list(arguments), len(arguments))
        return [arguments[argument] for argument in self._orders[name]]

    def plan(self, part: PagedPart) -> None:
        assert part.lists is not None
        self._lists, self._part = part.lists, part
        arguments = {
            "workspace": self._workspace,
            "plans": self._int_workspace_buffer,
            "pinned": self._pin_memory_int_workspace_buffer,
            "rows": part.query_starts,
            "starts": part.lists.host_starts,
            "num_rows": part.num_rows,
            "num_segments": len(part.kv_lengths),
            "causal": part.causal,
            "lengths": part.kv_lengths,
            "number": 2,
            "scale": 0.25,
        }
        self._plan_info = self._cached_module.plan(*self._ordered("plan", arguments))

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor, lse: Tensor, return_lse: bool) -> None:
        lists = self._lists
        arguments = {
            "workspace": self._workspace,
            "plans": self._int_workspace_buffer,
            "plan": self._plan_info,
            "query": query,
            "keys": cache[0],
            "values": cache[1],
            "rows": lists.query_starts.clone(),
            "again": lists.query_starts,
            "starts": lists.starts.clone(),
            "blocks": lists.blocks,
            "last": lists.last_lengths.clone(),
            "out": out,
            "lse": lse if return_lse else None,
            "mask": int(self._part.causal),
            "nothing": None,
            "pdl": True,
            **self._further(self._part),
        }
        self._cached_module.paged_run(*self._ordered("run", arguments))


def part_of(rows: list[int], causal: bool) -> PagedPart:
    """Contexts of two blocks each."""
    query_starts = torch.tensor([0, *rows]).cumsum(0).int()
    starts = 2 * torch.arange(len(rows) + 1, dtype=torch.int32)
    lengths = torch.tensor([(32, 17)[index % 2] for index in range(len(rows))], dtype=torch.int32)
    blocks = torch.zeros(int(starts[-1]), dtype=torch.int32)
    lists = BlockLists(starts, starts.clone(), blocks, lengths - 16, query_starts.clone(), lengths)
    return PagedPart(0, sum(rows), query_starts, None, lengths, causal, lists=lists)


PROMPTS = part_of([1, 2], True), part_of([2, 1, 2], False)
DECODES = part_of([1, 1], True), part_of([1, 1, 1], True)


def plain(arguments: tuple[Any, ...]) -> list[Any]:
    return [x.tolist() if isinstance(x, Tensor) and x.dtype == torch.int32 else x for x in arguments]


@pytest.mark.parametrize("seed", range(20))
def test_a_part_is_planned_and_run_as_by_the_wrapper_in_any_order_of_arguments(seed: int) -> None:
    for examples, part in ((PROMPTS, prompts_part([40, 3, 200])), (DECODES, decode_part(7, seed))):
        wrapper = Wrapper(seed)
        calls = learn_calls(wrapper, wrapper.plan, examples, CACHE, SHAPE)
        query, output, lse, cache = torch.zeros(part.num_rows, 4, 8), torch.zeros(1), torch.zeros(2), CACHE[::-1]
        wrapper.heard.clear()
        wrapper.plan(part)
        wrapper.run(query, cache, out=output, lse=lse, return_lse=True)
        by_wrapper = list(map(plain, wrapper.heard))
        wrapper.heard.clear()
        calls.plan(wrapper, part).run(query, cache, output, lse)
        for found, expected in zip(map(plain, wrapper.heard), by_wrapper, strict=True):
            assert all(x is y or (not isinstance(x, Tensor) and x == y) for x, y in zip(found, expected, strict=True))
            assert list(map(type, found)) == list(map(type, expected))


def test_a_recorded_size_is_planned_as_by_its_wrapper() -> None:
    first, later = decode_part(7, seed=0), decode_part(7, seed=1)
    wrapper = Wrapper(0)
    planner = learn_plan(wrapper, wrapper.plan, first)
    wrapper.heard.clear()
    wrapper.plan(later)
    planner.function(*planner.filled(True, kv_starts=later.lists and later.lists.host_starts))
    by_wrapper, alone = map(plain, wrapper.heard)
    # The planner of such parts does not read the lengths.
    assert [x for x in by_wrapper if x != later.kv_lengths.tolist()] == [
        x for x in alone if x != first.kv_lengths.tolist()
    ]


@pytest.mark.parametrize(
    "further",
    [
        lambda part: {"unknown": torch.zeros(part.num_rows)},
        lambda part: {"unknown": 0.5 * part.num_rows},
    ],
)
def test_arguments_that_are_not_known_are_refused(further: Callable[[PagedPart], dict[str, Any]]) -> None:
    wrapper = Wrapper(0, further)
    functions = dict(vars(wrapper._cached_module))
    with pytest.raises(UnknownCallError, match="is not known"):
        learn_calls(wrapper, wrapper.plan, PROMPTS, CACHE, SHAPE)
    assert vars(wrapper._cached_module) == functions


def test_a_wrapper_that_does_not_hand_on_a_tensor_is_refused() -> None:
    wrapper = Wrapper(0, lambda _part: {"values": None})
    with pytest.raises(UnknownCallError, match="values not found"):
        learn_calls(wrapper, wrapper.plan, PROMPTS, CACHE, SHAPE)
