"""FlashInfer's planner and kernels without its wrappers, whose Python takes longer than the launches.

A wrapper turns its `plan` and each `run` into one call of a compiled function with up to 60 arguments. Which of them
depend on the part and the layer is learnt here from two such calls of its own: no version's order is written down.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import KVShape, PagedPart

# S segments of a part, H query heads, D head size

_SMALL = 256
"""Most numbers of tensors that are compared by value."""

_FUNCTIONS = ("plan", "run", "paged_run")
"""What wrappers call."""

_NEEDED_BY_PLAN = {"plans", "pinned", "kv_starts", "num_segments"}
_BY_LAYER = ("query", "keys", "values", "output", "lse")
_NEEDED_BY_RUN = {"plan", "plans", *_BY_LAYER, "kv_starts", "blocks", "last_lengths"}
_OF_PROMPTS = {"query_starts", "causal"}


class UnknownCallError(RuntimeError):
    """A wrapper calls its functions in a way that is not understood."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """A call that a wrapper has made, and what it was made for, by name."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    known: Mapping[str, Any]
    causal: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A function with its arguments, but for those that depend on the part or the layer."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    places: Mapping[str, Sequence[int]]
    """Where arguments are to be filled in, by their names."""
    masks: Mapping[int, tuple[Any, Any]]
    """Arguments for a part that is not causal, and for one that is, by their places."""

    def filled(self, causal: bool, **named: Any) -> list[Any]:
        """The arguments; those that are not named are None."""
        arguments = list(self.arguments)
        for place, choice in self.masks.items():
            arguments[place] = choice[causal]
        for name, value in named.items():
            for place in self.places.get(name, ()):
                arguments[place] = value
        return arguments


class PlannedCall:
    """A planned part, whose kernels can be run layer by layer."""

    __slots__ = ("_arguments", "_function", "_places")

    def __init__(self, function: Callable[..., Any], arguments: list[Any], places: tuple[int, ...]) -> None:
        """places: of query, keys, values, output and LSE."""
        self._function = function
        self._arguments = arguments
        self._places = places

    def run(self, query: Tensor, kv_cache: tuple[Tensor, Tensor], output: Tensor, lse: Tensor | None) -> None:
        """As the wrapper's `run`: fills output, which has the planned dtype, and lse unless it is None."""
        arguments = self._arguments
        query_place, keys_place, values_place, output_place, lse_place = self._places
        arguments[query_place] = query
        arguments[keys_place], arguments[values_place] = kv_cache
        arguments[output_place] = output
        arguments[lse_place] = lse
        self._function(*arguments)


@dataclass(frozen=True, slots=True)
class PartCalls:
    """The planner and the kernels of one kind of wrapper."""

    planner: Call
    kernels: Call

    def plan(self, wrapper: Any, part: PagedPart) -> PlannedCall:
        """Plan a part with lists in the wrapper's plan memory, which the device gets by a copy."""
        lists = part.lists
        assert lists is not None
        plans, num_segments = wrapper._int_workspace_buffer, len(part.kv_lengths)
        plan = self.planner.function(
            *self.planner.filled(
                part.causal,
                plans=plans,
                pinned=wrapper._pin_memory_int_workspace_buffer,
                query_starts=part.query_starts,
                kv_starts=lists.host_starts,
                kv_lengths=part.kv_lengths,
                num_rows=part.num_rows,
                num_segments=num_segments,
            )
        )
        arguments = self.kernels.filled(
            part.causal,
            plan=plan,
            plans=plans,
            query_starts=lists.query_starts,
            kv_starts=lists.starts,
            blocks=lists.blocks,
            last_lengths=lists.last_lengths,
            num_segments=num_segments,
        )
        places = tuple(self.kernels.places[name][0] for name in _BY_LAYER)
        return PlannedCall(self.kernels.function, arguments, places)


def learn_calls(
    wrapper: Any,
    plan: Callable[[PagedPart], None],
    parts: tuple[PagedPart, PagedPart],
    kv_cache: tuple[Tensor, Tensor],
    shape: KVShape,
) -> PartCalls:
    """Learn from two parts, which are planned and run. Raises UnknownCallError, or what FlashInfer raises.

    wrapper: planned by `plan`. parts: with lists, and different in all that parts of this wrapper may differ in; of a
    wrapper for prompts, the second is not causal. kv_cache: of any layer."""
    plan(parts[0])  # loads the functions
    plans, runs = zip(*(_hear(wrapper, plan, part, kv_cache, shape) for part in parts), strict=True)
    calls = PartCalls(_compare(*plans), _compare(*runs))
    needed_by_plan, needed_by_run = _NEEDED_BY_PLAN, _NEEDED_BY_RUN
    if parts[0].causal != parts[1].causal:
        needed_by_plan, needed_by_run = needed_by_plan | {"num_rows", *_OF_PROMPTS}, needed_by_run | _OF_PROMPTS
    for call, needed in ((calls.planner, needed_by_plan), (calls.kernels, needed_by_run)):
        found = call.places.keys() | ({"causal"} if call.masks else set())
        if not needed <= found:
            raise UnknownCallError(f"{', '.join(sorted(needed - found))} not found in a call of FlashInfer's wrapper")
    if any(len(calls.kernels.places[name]) != 1 for name in _BY_LAYER):
        raise UnknownCallError("FlashInfer's wrapper hands on a layer's tensors more than once")
    return calls


def learn_plan(wrapper: Any, plan: Callable[[PagedPart], None], part: PagedPart) -> Call:
    """Learn the planner's call for parts that differ in their blocks alone, whose places are named kv_starts."""
    plan(part)  # loads the functions
    with _overheard(wrapper._cached_module) as heard:
        plan(part)
    ((function, arguments, _),) = heard
    assert part.lists is not None
    known = {"kv_starts": part.lists.host_starts}
    only = _Heard(function, arguments, known, part.causal)
    return _compare(only, only)


@contextmanager
def _overheard(module: Any) -> Iterator[list[tuple[Callable[..., Any], tuple[Any, ...], Any]]]:
    """Yields the calls of the module's functions inside, each with its result; they are made as usual."""
    functions = {name: value for name, value in vars(module).items() if name in _FUNCTIONS}
    heard: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = []

    def listening(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            heard.append((function, arguments, result))
            return result

        return call

    try:
        for name, function in functions.items():
            setattr(module, name, listening(function))
        yield heard
    finally:
        for name, function in functions.items():
            setattr(module, name, function)


def _hear(
    wrapper: Any, plan: Callable[[PagedPart], None], part: PagedPart, kv_cache: tuple[Tensor, Tensor], shape: KVShape
) -> tuple[_Heard, _Heard]:
    """The calls that plan and run the part."""
    lists, device = part.lists, shape.device
    assert lists is not None
    query = torch.zeros((part.num_rows, shape.num_heads, shape.head_dim), dtype=shape.query_dtype, device=device)
    output, lse = torch.empty_like(query), torch.empty(query.shape[:2], dtype=torch.float32, device=device)
    with _overheard(wrapper._cached_module) as heard:
        plan(part)
        wrapper.run(query, kv_cache, out=output, lse=lse, return_lse=True)
    if len(heard) != 2:
        raise UnknownCallError(f"FlashInfer's wrapper makes {len(heard)} calls for one plan and one run")
    (planner, of_plan, result), (kernels, of_run, _) = heard
    both = {"num_segments": len(part.kv_lengths), "plans": wrapper._int_workspace_buffer}
    known_to_plan = {
        **both,
        "num_rows": part.num_rows,
        "pinned": wrapper._pin_memory_int_workspace_buffer,
        "query_starts": part.query_starts,
        "kv_starts": lists.host_starts,
        "kv_lengths": part.kv_lengths,
    }
    known_to_run = {
        **both,
        "plan": result,
        "query": query,
        "keys": kv_cache[0],
        "values": kv_cache[1],
        "output": output,
        "lse": lse,
        "query_starts": lists.query_starts,
        "kv_starts": lists.starts,
        "blocks": lists.blocks,
        "last_lengths": lists.last_lengths,
    }
    return (
        _Heard(planner, of_plan, known_to_plan, part.causal),
        _Heard(kernels, of_run, known_to_run, part.causal),
    )


def _compare(first: _Heard, second: _Heard) -> Call:
    """The call that both are made from. Raises UnknownCallError if an argument differs in a way that is not known."""
    if len(first.arguments) != len(second.arguments) or first.function is not second.function:
        raise UnknownCallError("FlashInfer's wrapper makes different calls for different parts")
    places: dict[str, list[int]] = {}
    masks: dict[int, tuple[Any, Any]] = {}
    arguments = list(first.arguments)
    for place, pair in enumerate(zip(first.arguments, second.arguments, strict=True)):
        name = _name_of(pair, {name: (value, second.known[name]) for name, value in first.known.items()})
        if name is not None:
            places.setdefault(name, []).append(place)
            arguments[place] = None
        elif not _is_same(*pair):
            if first.causal == second.causal or not all(isinstance(argument, int) for argument in pair):
                raise UnknownCallError(f"argument {place} of a call of FlashInfer's wrapper is not known")
            masks[place] = (pair[1], pair[0]) if first.causal else pair
    return Call(first.function, tuple(arguments), places, masks)


def _name_of(pair: tuple[Any, Any], known: Mapping[str, tuple[Any, Any]]) -> str | None:
    """What an argument of two calls is: the same objects; or equal lists or numbers, other ones in each call."""
    for name, values in known.items():
        if all(map(operator.is_, pair, values)) and not isinstance(pair[0], int):
            return name
    for name, values in known.items():
        is_list = all(isinstance(value, Tensor) and value.dtype == torch.int32 for value in values)
        if (is_list or isinstance(values[0], int)) and not _is_same(*values) and all(map(_is_same, pair, values)):
            return name
    return None


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        is_alike = (value.dtype, value.device, value.shape) == (other.dtype, other.device, other.shape)
        return is_alike and value.numel() <= _SMALL and torch.equal(value, other)
    return type(value) is type(other) and not isinstance(value, Tensor) and bool(value == other)
