"""Paged attention by FlashInfer's kernels on CUDA: for versions 0.6.18, which has run on an H200, and 0.7.2.

Rows that are segments of their own (decode) take FlashInfer's decode wrapper, other parts its prefill wrapper "fa2".
Prompts that share no prefix take "fa3" where a start on Hopper finds it right and faster: it does not split contexts.
FlashInfer has no float32 output: parts that will be merged are asked for in the query's dtype. Its log-sum-exp (LSE) is
base 2, and so is the backend's; our own kernel merges, in float32.

A plan fixes how scores are made: each part is planned once for each kind of layer, which are those with equal scale,
window and cap. FlashInfer's windows end at a row's own position, which a row has in no prefix: models with windows have
no prefix groups. Sinks are counted after its kernels.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import (
    BlockLists,
    KVShape,
    PagedLayout,
    PagedPart,
    RecordedMemory,
    Scores,
    TensorCache,
    as_stored,
)
from tokasaurus.model.attention.flashinfer_calls import Call, PartCalls, PlannedCall, learn_calls, learn_plan
from tokasaurus.model.attention.flashinfer_tools import provide_tools
from tokasaurus.model.attention.row_split import count_sinks, merge_partial
from tokasaurus.model.buffer_sizes import (
    HEAD_DIMS,
    RING_SIZE,
    decodes_on_cuda_cores,
    fa3_plan_bytes,
    plan_bytes,
    workspace_bytes,
)
from tokasaurus.model.staging.staging import DirectStaging
from tokasaurus.model.triton_choice import uses_triton

# T tokens, S segments of a part, N blocks of all segments, H query heads, K key/value heads, D head size, P page size


DTYPES = (torch.bfloat16, torch.float16)


class Wrapper(Protocol):
    """What is used of FlashInfer's wrappers: the plan of one part of a forward, then one run per layer."""

    def plan(self, *args: Tensor, **options: Any) -> None: ...

    def run(
        self,
        query: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None,
        lse: Tensor | None = None,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]: ...

    def reset_workspace_buffer(self, workspace: Tensor, plans: Tensor) -> None: ...

    _plan_info: Any
    """What the planner of its functions has returned."""


class DecodeModule(Protocol):
    """What is used of the module `flashinfer.decode`."""

    fast_decode_plan: Callable[..., None]
    """(wrapper, indptr, indices, last_page_len, ...): a plan after the wrapper's first, which fills no buffers."""


class Library(Protocol):
    """What is used of the package `flashinfer`."""

    decode: DecodeModule
    BatchPrefillWithPagedKVCacheWrapper: Callable[..., Wrapper]
    BatchDecodeWithPagedKVCacheWrapper: Callable[..., Wrapper]


@dataclass(slots=True)
class _WrapperSet:
    """The wrappers of one forward. Each has host memory that its plan's copy to the device reads: the set may be
    planned again once `copied` has happened."""

    prefill: list[Wrapper] = field(default_factory=list)
    decode: list[Wrapper] = field(default_factory=list)
    """For each kind of layer in turn."""
    fa3: Wrapper | None = None
    """For the prompts of a forward, if they share no prefix."""
    plan_bytes: int = 0
    """Bytes of each wrapper's plan memory, on the device and pinned; 0 if a wrapper still has its own."""

    copied: torch.cuda.Event | None = None


def has_fa3(device: torch.device) -> bool:
    """Whether FlashInfer has "fa3" for the device: it is written for Hopper alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@contextmanager
def compiling_nothing() -> Iterator[list[Any]]:
    """Within the context, FlashInfer raises an error in place of compiling a kernel. Yields the JitSpecs of those."""
    try:
        from flashinfer.jit.core import JitSpec
    except ImportError:
        yield []
        return
    build_and_load, missing = JitSpec.build_and_load, list[Any]()

    def load_only(spec: Any) -> Any:
        if not spec.is_compiled:
            missing.append(spec)
            raise RuntimeError(f"{spec.name} is not compiled")
        return build_and_load(spec)

    JitSpec.build_and_load = load_only
    try:
        yield missing
    finally:
        JitSpec.build_and_load = build_and_load


def load_library() -> Library:
    provide_tools(os.environ)
    import flashinfer

    return cast(Library, flashinfer)


def why_unfit(shape: KVShape) -> str | None:
    """Why FlashInfer cannot serve this device or model, or None if it can."""
    if shape.device.type != "cuda":
        return f"it does not run on device={shape.device.type}"
    if shape.dtype not in DTYPES or shape.query_dtype != shape.dtype:
        names = (str(dtype).removeprefix("torch.") for dtype in (shape.query_dtype, shape.dtype))
        return "it needs dtype and kv_cache_dtype both bfloat16 or both float16, not {} and {}".format(*names)
    if shape.head_dim not in HEAD_DIMS:
        return f"it has no kernels for head size {shape.head_dim}, only for {', '.join(map(str, HEAD_DIMS))}"
    if shape.has_chunks:
        return "it computes no attention within chunks"
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed (pip install flashinfer-python)"
    return None


class FixedMemory:
    """What recorded launches read: each plan of a wrapper is copied here, and each step's lists are filled here.

    A wrapper is for one number of rows and one kind of layer. One at a time is planned and run, so all of a kind use
    the same memory.
    """

    def __init__(self, new_wrapper: Any, workspace: Tensor, num_kinds: int, max_rows: int, max_blocks: int) -> None:
        """new_wrapper: makes a decode wrapper for a kind, with options. workspace: of all wrappers, as FlashInfer wants
        it. max_blocks: of the longest sequence."""
        self._new_wrapper = new_wrapper
        self._workspace = workspace
        self.max_rows, self.max_blocks = max_rows, max_blocks
        self.lists = RecordedMemory.allocate(max_rows, max_blocks, workspace.device)
        self._plans = torch.zeros((num_kinds, plan_bytes(max_rows)), dtype=torch.uint8, device=workspace.device)
        self._wrappers: dict[tuple[int, int], Any] = {}
        self.copied: dict[int, torch.cuda.Event] = {}
        """Events after the copies of the last plans, which read the wrappers' host memory, by number of rows."""
        self.planned: set[tuple[int, int]] = set()
        """Numbers of rows, and kinds, whose wrapper has been planned."""
        self.planners: dict[tuple[int, int], Call] = {}
        """What calls FlashInfer's planner without the wrapper, by number of rows and kind."""

    def wrapper(self, num_rows: int, kind: int) -> Any:
        """The wrapper for this number of rows S; made at its first use, which must not be recorded."""
        if (num_rows, kind) not in self._wrappers:
            own = self.lists.cut(num_rows)
            wrapper = self._new_wrapper(
                kind,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=own.starts,
                paged_kv_indices_buffer=own.blocks,
                paged_kv_last_page_len_buffer=own.last_lengths,
            )
            # Instead of memory of its own for its plans
            wrapper.reset_workspace_buffer(self._workspace, self._plans[kind])
            self._wrappers[num_rows, kind] = wrapper
        return self._wrappers[num_rows, kind]


class FixedPrefixes:
    """What recorded launches read of shared prefixes, as FixedMemory, and the LSE that they write.

    A wrapper is for one number of rows and of groups, and one kind of layer. Its kernels write nothing for the rows
    after those of its groups: the plan of each step sets their LSE to -inf, and no layer changes it.
    """

    def __init__(
        self, new_wrapper: Any, fixed: FixedMemory, workspace: Tensor, num_kinds: int, max_groups: int, num_heads: int
    ) -> None:
        """new_wrapper: makes a prefill wrapper with these options. The others are as in FixedMemory."""
        self._new_wrapper = new_wrapper
        self._workspace = workspace
        self.lists = RecordedMemory.allocate(max_groups, fixed.max_blocks, workspace.device)
        self.lse = torch.zeros((fixed.max_rows, num_heads), device=workspace.device)
        self._query_starts = torch.zeros(max_groups + 1, dtype=torch.int32, device=workspace.device)
        self._plans = torch.zeros((num_kinds, plan_bytes(fixed.max_rows)), dtype=torch.uint8, device=workspace.device)
        self._wrappers: dict[tuple[int, int], Any] = {}

    def wrapper(self, num_rows: int, kind: int, prefix: PagedPart) -> Any:
        """The wrapper for this number of rows; made before the step that is recorded, whose prefix has all of them:
        FlashInfer takes the rows of its first plan as the most."""
        if (num_rows, kind) not in self._wrappers:
            assert prefix.num_rows == num_rows, "a recording comes first"
            num_groups = len(prefix.kv_lengths)
            own = self.lists.cut(num_groups)
            wrapper = self._new_wrapper(
                use_cuda_graph=True,
                qo_indptr_buf=self._query_starts[: num_groups + 1],
                paged_kv_indptr_buf=own.starts,
                paged_kv_indices_buf=own.blocks,
                paged_kv_last_page_len_buf=own.last_lengths,
            )
            wrapper.reset_workspace_buffer(self._workspace, self._plans[kind])
            self._wrappers[num_rows, kind] = wrapper
        return self._wrappers[num_rows, kind]


class FlashInferBackend(TensorCache):
    """KV cache as keys and values [layers, blocks, P, K, D], the layout that FlashInfer calls NHD."""

    def __init__(self, shape: KVShape, library: Library, max_graph_rows: int = 0) -> None:
        """Creates the workspaces and compiles the kernels: minutes, unless FlashInfer has them in its cache.

        max_graph_rows: as for workspace_bytes."""
        self._shape = shape
        every = [shape.scores_of(index) for index in range(shape.num_layers)]
        without_sinks = [scores._replace(sinks=None) for scores in every]
        self._kinds = list(dict.fromkeys(without_sinks))
        """How the layers make scores: each part is planned for each of these."""
        self._kind_of = [self._kinds.index(scores) for scores in without_sinks]
        """By layer."""
        self._sinks = [scores.sinks for scores in every]
        self.computes_groups = all(kind.window is None for kind in self._kinds)
        self.computes_by_fa3 = all(kind[1:] == (None, None, None) for kind in self._kinds) and len(self._kinds) == 1
        """Whether prompts may take "fa3": if layers are of one kind, without window and cap."""
        self._library = library
        on_cuda = shape.device.type == "cuda"
        processors = torch.cuda.get_device_properties(shape.device).multi_processor_count if on_cuda else 1
        self._num_processors = processors
        # One for all wrappers: their kernels run one after another, on one stream.
        num_bytes = workspace_bytes(shape, processors, max_graph_rows, has_windows=not self.computes_groups)
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=shape.device)
        self._sets = [_WrapperSet() for _ in range(RING_SIZE)]
        for wrappers in self._sets:  # now, so that the KV cache leaves their memory free
            # A forward without prefix groups has one part of prompts and one of decode rows, one with groups two.
            for kind in [*range(len(self._kinds))] * 2:
                wrappers.prefill.append(self._new_prefill())
                wrappers.decode.append(self._new_decode(kind))
            self._make_plan_memory(wrappers, plan_bytes(0))
        self._next_set = 0
        self._planned: dict[tuple[int, int], Wrapper] = {}
        """By the part's id and the kind of layer, as everything here that is planned."""
        self._calls: dict[tuple[str, int], PartCalls] = {}
        """How to plan and run parts without wrappers, by kernels and kind of layer; empty if that is not in use."""
        self._planned_calls: dict[tuple[int, int], PlannedCall] = {}
        self._fixed: FixedMemory | None = None
        self._prefixes: FixedPrefixes | None = None
        self._recorded_prefix: PagedPart | None = None
        """Of the planned layout, if a recording attends to it."""
        self.uses_fa3 = False
        """Whether prompts take "fa3"; may be changed once it is prepared."""
        self._run_once((1, 2))

    def _cache_size(self, num_blocks: int) -> tuple[int, ...]:
        shape = self._shape
        return (shape.num_layers, num_blocks, shape.page_size, shape.num_kv_heads, shape.head_dim)

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        # Views that every layer of every forward needs: made once, each takes the host a microsecond.
        self._by_layer = list(zip(self._keys, self._values, strict=True))
        self._tokens_by_layer = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self._by_layer]

    def plan(self, layout: PagedLayout) -> None:
        """FlashInfer's own plans run when the staged arrays are sent, since they launch copies to the device."""
        self._kv_indices = layout.kv_indices
        self._layout = layout  # keeps the parts alive: _planned is keyed by their ids
        self._planned = {}
        self._planned_calls = {}
        self._recorded_prefix = None
        parts = layout.parts if layout.prefix is None else (*layout.parts, layout.prefix)
        if not parts:
            return
        wrappers = self._sets[self._next_set]
        self._next_set = (self._next_set + 1) % len(self._sets)
        staging = layout.staging or DirectStaging(self._shape.device)
        num_prefill = num_decode = 0
        plans: list[Callable[[], None]] = []
        for part in parts:
            is_decode = _is_decode(part)
            assert is_decode or part.causal or self.computes_groups, "a window would end at each row's own position"
            for kind in range(len(self._kinds)):
                if is_decode:
                    if num_decode == len(wrappers.decode):
                        wrappers.decode.append(self._new_decode(kind))
                        wrappers.plan_bytes = 0
                    kernels, wrapper = "decode", wrappers.decode[num_decode]
                    plan = partial(self._plan_decode, wrapper, kind, part)
                    num_decode += 1
                elif self.uses_fa3 and wrappers.fa3 is not None and self._fits_fa3(part, wrappers):
                    kernels, wrapper = "fa3", wrappers.fa3
                    plan = partial(self._plan_prefill, wrapper, kind, part, part.kv_lengths)
                else:
                    if num_prefill == len(wrappers.prefill):
                        wrappers.prefill.append(self._new_prefill())
                        wrappers.plan_bytes = 0
                    kernels, wrapper = "fa2", wrappers.prefill[num_prefill]
                    plan = partial(self._plan_prefill, wrapper, kind, part, _longest(part))
                    num_prefill += 1
                calls = self._calls.get((kernels, kind))
                if calls is not None and part.lists is not None:
                    plan = partial(self._plan_call, calls, wrapper, kind, part)
                plans.append(plan)
                self._planned[id(part), kind] = wrapper
        needed = max(plan_bytes(part.num_rows) for part in parts)
        if needed > wrappers.plan_bytes:
            self._make_plan_memory(wrappers, needed)
        staging.then(partial(self._run_plans, wrappers, plans))

    def prepare_calls(self) -> None:
        """Plan and run parts by FlashInfer's functions, without its wrappers, from now on. Replaces the cache. Raises
        UnknownCallError, or what FlashInfer raises."""
        self.allocate(1)
        wrappers = self._sets[0]
        # Both have the same longest segment, which wrappers hand on but "fa2" and "fa3" do not read.
        prompts, rows = (self._example((1, 2), True), self._example((2, 1, 2), False)), (1, 1, 1)
        learn = partial(learn_calls, kv_cache=self._by_layer[0], shape=self._shape)
        decodes = self._example(rows[:2], True), self._example(rows, True)
        calls = dict[tuple[str, int], PartCalls]()
        kernels = {"fa2": wrappers.prefill[0]} | ({} if wrappers.fa3 is None else {"fa3": wrappers.fa3})
        for kind in range(len(self._kinds)):
            decode = wrappers.decode[kind]
            calls["decode", kind] = learn(decode, partial(self._plan_decode, decode, kind), decodes)
            for name, wrapper in kernels.items():
                calls[name, kind] = learn(wrapper, partial(self._plan_lengths, wrapper, kind), prompts)
        self._calls = calls

    def drop_calls(self) -> None:
        """Plan and run by the wrappers."""
        self._calls = {}
        if self._fixed is not None:
            self._fixed.planners.clear()

    def prepare_fa3(self) -> None:
        """Let prompts take "fa3". Compiles its kernel, which may take minutes. Raises what FlashInfer raises."""
        assert self.computes_by_fa3
        for wrappers in self._sets:
            wrappers.fa3 = self._new_prefill("fa3")
            self._make_plan_memory(wrappers, wrappers.plan_bytes)
        self.uses_fa3 = True
        if self._calls:
            self.prepare_calls()
        else:
            self._run_once((2,))

    def drop_fa3(self) -> None:
        """Free its wrappers."""
        self.uses_fa3 = False
        self._calls.pop(("fa3", 0), None)
        for wrappers in self._sets:
            wrappers.fa3 = None

    def _fits_fa3(self, part: PagedPart, wrappers: _WrapperSet) -> bool:
        """Whether "fa3" can plan the part, whose plan grows with the number of prompts and heads."""
        shape, num_segments = self._shape, len(part.kv_lengths)
        is_planned = wrappers.fa3 in self._planned.values()  # of another part
        needed = fa3_plan_bytes(part.num_rows, num_segments, shape, self._num_processors)
        return not part.is_partial and not is_planned and needed <= wrappers.plan_bytes

    def prepare_recording(self, max_rows: int, max_blocks: int) -> RecordedMemory:
        needed = workspace_bytes(self._shape, self._num_processors, max_rows, has_windows=not self.computes_groups)
        assert needed <= len(self._workspace), f"max_graph_rows was less than {max_rows}"
        self._fixed = FixedMemory(self._new_decode, self._workspace, len(self._kinds), max_rows, max_blocks)
        self._prefixes = None
        return self._fixed.lists

    def prepare_groups(self, max_groups: int) -> RecordedMemory:
        assert self._fixed is not None, "prepare_recording comes first"
        assert self.computes_groups or not max_groups
        self._prefixes = FixedPrefixes(
            self._new_prefill, self._fixed, self._workspace, len(self._kinds), max_groups, self._shape.num_heads
        )
        return self._prefixes.lists

    def plan_recorded(self, layout: PagedLayout) -> None:
        assert self._fixed is not None, "prepare_recording comes first"
        (part,) = layout.parts
        assert _is_decode(part)
        kinds = range(len(self._kinds))
        wrappers = [self._fixed.wrapper(part.num_rows, kind) for kind in kinds]
        self._layout = layout  # keeps the parts alive
        self._planned = {(id(part), kind): wrapper for kind, wrapper in enumerate(wrappers)}
        self._planned_calls = {}
        self._kv_indices = layout.kv_indices
        self._recorded_prefix = prefix = layout.prefix
        staging = layout.staging or DirectStaging(self._shape.device)
        if prefix is not None:
            assert self._prefixes is not None, "prepare_groups comes first"
            of_prefix = [self._prefixes.wrapper(part.num_rows, kind, prefix) for kind in kinds]
            self._planned |= {(id(prefix), kind): wrapper for kind, wrapper in enumerate(of_prefix)}
            staging.then(partial(self._run_prefix_plan, self._fixed, self._prefixes, of_prefix, part, prefix))
        staging.then(partial(self._run_recorded_plan, self._fixed, wrappers, part))

    def _run_prefix_plan(
        self, fixed: FixedMemory, prefixes: FixedPrefixes, wrappers: list[Wrapper], part: PagedPart, prefix: PagedPart
    ) -> None:
        """part: the step's. The plan of its rows comes next, and records when the copies of both plans have run."""
        copied = fixed.copied.get(part.num_rows)
        if copied is not None:
            copied.synchronize()
        for kind, wrapper in enumerate(wrappers):
            self._plan_prefill(wrapper, kind, prefix, _longest(prefix))
        prefixes.lse[: part.num_rows].fill_(-torch.inf)

    def _run_recorded_plan(self, fixed: FixedMemory, wrappers: list[Wrapper], part: PagedPart) -> None:
        copied = fixed.copied.get(part.num_rows)
        if copied is not None:
            # Not long: its copies ran before the step that is running now, at the latest.
            copied.synchronize()
        for kind, wrapper in enumerate(wrappers):
            key = part.num_rows, kind
            planner = fixed.planners.get(key)
            if part.lists is not None and planner is not None:
                wrapper._plan_info = planner.function(*planner.filled(part.causal, kv_starts=part.lists.host_starts))
            elif part.lists is not None and self._calls:
                fixed.planners[key] = learn_plan(wrapper, partial(self._plan_decode, wrapper, kind), part)
            elif part.lists is not None and key in fixed.planned:
                # The wrapper's own plan would fill the lists again, by three copies.
                self._plan_rows(partial(self._library.decode.fast_decode_plan, wrapper), kind, part)
            else:
                self._plan_decode(wrapper, kind, part)
                fixed.planned.add(key)
        if self._shape.device.type == "cuda":
            if copied is None:
                fixed.copied[part.num_rows] = copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()

    def write(self, key: Tensor, value: Tensor, layer_index: int) -> None:
        keys, values = self._tokens_by_layer[layer_index]  # [tokens, K, D]
        if uses_triton(self._shape.device, "attention"):
            from tokasaurus.model.attention import triton_kernels

            triton_kernels.write_kv(keys, values, key, value, self._kv_indices, self._shape.page_size)
            return
        for tokens, new in ((keys, key), (values, value)):
            tokens[self._kv_indices] = as_stored(new, tokens.dtype)

    def attend(
        self, query: Tensor, layer_index: int, part: PagedPart, output: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if part is self._recorded_prefix:
            return self._attend_recorded_prefix(query, layer_index, part)
        sinks = None if part is self._layout.prefix else self._sinks[layer_index]  # which count once
        needs_lse = part.is_partial or sinks is not None
        key = id(part), self._kind_of[layer_index]
        # FlashInfer reads the query's strides, but neither reads nor checks the output's.
        planned = self._planned_calls.get(key)
        lse = None
        if planned is not None:
            if needs_lse:
                lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            if output is None:
                output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            planned.run(query, self._by_layer[layer_index], output, lse)
        else:
            assert query.stride(2) == 1
            assert output is None or output.is_contiguous()
            result = self._planned[key].run(query, self._by_layer[layer_index], out=output, return_lse=needs_lse)
            output, lse = (result, None) if isinstance(result, Tensor) else result
        if sinks is not None:
            assert lse is not None
            self._count_sinks(output, lse, sinks)
        return output, lse

    def _attend_recorded_prefix(self, query: Tensor, layer_index: int, part: PagedPart) -> tuple[Tensor, Tensor]:
        """query: of all rows of the step, of which those after the groups' get no output, and the LSE -inf."""
        assert self._prefixes is not None
        assert query.stride(2) == 1
        # The kernel that merges reads no output with the LSE -inf; plain torch multiplies it with 0.
        make = torch.empty if uses_triton(self._shape.device, "attention") else torch.zeros
        output = make(query.shape, dtype=query.dtype, device=query.device)
        lse = self._prefixes.lse[: len(query)]
        wrapper = self._planned[id(part), self._kind_of[layer_index]]
        kv_cache = self._by_layer[layer_index]
        wrapper.run(query, kv_cache, out=output, lse=lse, return_lse=True)
        return output, lse

    def _count_sinks(self, output: Tensor, lse: Tensor, sinks: Tensor) -> None:
        if uses_triton(self._shape.device, "attention"):
            from tokasaurus.model.attention import triton_kernels

            triton_kernels.count_sinks(output, lse, sinks)
        else:
            count_sinks(output, lse, sinks)

    def merge(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
        if uses_triton(self._shape.device, "attention"):
            from tokasaurus.model.attention import triton_kernels

            return triton_kernels.merge_partial(first, second, output, True)
        return merge_partial(first, second, output, True)

    def _new_prefill(self, kernels: str = "fa2", **options: Any) -> Wrapper:
        # Not "auto": on Hopper that is "fa3", which does not split long contexts of few segments.
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=kernels, **options)

    def _new_decode(self, kind: int, **options: Any) -> Wrapper:
        on_cuda_cores = decodes_on_cuda_cores(self._shape, self._kinds[kind].window is not None)
        # Not "auto": since 0.7 that may be cuDNN, which has rules of its own for its lists and buffers.
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=not on_cuda_cores, backend="fa2", **options
        )

    def _make_plan_memory(self, wrappers: _WrapperSet, num_bytes: int) -> None:
        """Give each wrapper of the set plan memory, instead of the 8 MiB that it makes itself."""
        if wrappers.copied is not None:
            wrappers.copied.synchronize()  # its copies read the memory that is freed here
        for wrapper in (*wrappers.prefill, *wrappers.decode, *([] if wrappers.fa3 is None else [wrappers.fa3])):
            plans = torch.zeros(num_bytes, dtype=torch.uint8, device=self._shape.device)
            wrapper.reset_workspace_buffer(self._workspace, plans)
        wrappers.plan_bytes = num_bytes

    def _run_plans(self, wrappers: _WrapperSet, plans: list[Callable[[], None]]) -> None:
        if wrappers.copied is not None:
            wrappers.copied.synchronize()
        for plan in plans:
            plan()
        if self._shape.device.type == "cuda":
            if wrappers.copied is None:
                wrappers.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            wrappers.copied.record()

    def _plan_call(self, calls: PartCalls, wrapper: Wrapper, kind: int, part: PagedPart) -> None:
        self._planned_calls[id(part), kind] = calls.plan(wrapper, part)

    def _plan_lengths(self, wrapper: Wrapper, kind: int, part: PagedPart) -> None:
        self._plan_prefill(wrapper, kind, part, part.kv_lengths)

    def _plan_prefill(self, wrapper: Wrapper, kind: int, part: PagedPart, lengths: Tensor) -> None:
        """lengths: for `seq_lens`."""
        shape = self._shape
        wrapper.plan(
            part.query_starts,
            *self._kv_lists(part),
            num_qo_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim_qk=shape.head_dim,
            page_size=shape.page_size,
            causal=part.causal,
            o_data_type=shape.query_dtype,
            max_token_per_sequence=int(part.query_starts.diff().max()),
            seq_lens=lengths,
            **self._options(self._kinds[kind]),
        )

    def _plan_decode(self, wrapper: Wrapper, kind: int, part: PagedPart) -> None:
        self._plan_rows(wrapper.plan, kind, part, o_data_type=self._shape.query_dtype, seq_lens=_longest(part))

    def _plan_rows(self, plan: Callable[..., None], kind: int, part: PagedPart, **options: Any) -> None:
        shape = self._shape
        plan(
            *self._kv_lists(part),
            num_qo_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            **self._options(self._kinds[kind]),
            **options,
        )

    def _options(self, kind: Scores) -> dict[str, object]:
        options: dict[str, object] = {
            "sm_scale": kind.scale,
            "q_data_type": self._shape.query_dtype,
            "kv_data_type": self._shape.dtype,
        }
        if kind.window is not None:
            options["window_left"] = kind.window - 1  # tokens before a row's own
        if kind.softcap is not None:
            options["logits_soft_cap"] = kind.softcap
        return options

    def _kv_lists(self, part: PagedPart) -> tuple[Tensor, Tensor, Tensor]:
        """FlashInfer's indptr [S + 1] and last_page_len [S] on the host, where its plan reads them; between them its
        indices [N] on the device. All are int32. A segment without tokens has no blocks, and a last length of 0."""
        page_size = self._shape.page_size
        counts = (part.kv_lengths + (page_size - 1)) // page_size
        last_lengths = part.kv_lengths - (counts - 1).clamp_min(0) * page_size
        if part.lists is not None:
            return part.lists.host_starts, part.lists.blocks, last_lengths
        assert part.block_table is not None
        starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
        torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
        table = part.block_table[:, : int(counts.max())]
        blocks = table[torch.arange(table.shape[1]) < counts.unsqueeze(1)]
        return starts, blocks.to(self._shape.device), last_lengths

    def _run_once(self, row_counts: Sequence[int]) -> None:
        """Run a kernel once on the padding block, which compiles it. With and without LSE it is the same kernel.

        row_counts: 1 is decode, 2 is prefill."""
        self.allocate(1)
        shape = self._shape
        query = torch.zeros((2, shape.num_heads, shape.head_dim), dtype=shape.query_dtype, device=shape.device)
        no_tokens = torch.zeros(0, dtype=torch.int64, device=shape.device)
        for num_rows in row_counts:
            part = self._example((num_rows,), causal=True, is_run_alone=False)
            self.plan(PagedLayout(no_tokens, (part,)))
            for kind in range(len(self._kinds)):
                self.attend(query[:num_rows], self._kind_of.index(kind), part)

    def _example(self, row_counts: Sequence[int], causal: bool, is_run_alone: bool = True) -> PagedPart:
        """Segments of so many rows, in turn with two full blocks of context and with one token more than a block; all
        blocks are the padding block. is_run_alone: without a wrapper, which reads all but the blocks on the host."""
        page_size, device = self._shape.page_size, self._shape.device
        lengths = torch.tensor([(2 * page_size, page_size + 1)[i % 2] for i in range(len(row_counts))])
        query_starts = torch.tensor([0, *row_counts]).cumsum(0)
        starts = 2 * torch.arange(len(row_counts) + 1)
        starts, query_starts, lengths = (x.to(torch.int32) for x in (starts, query_starts, lengths))
        blocks = torch.zeros(int(starts[-1]), dtype=torch.int32, device=device)
        others = starts, lengths - page_size, query_starts, lengths
        own_starts, last_lengths, *own = (x.to(device) for x in others) if is_run_alone else others
        lists = BlockLists(starts, own_starts, blocks, last_lengths, *own)
        return PagedPart(0, int(query_starts[-1]), query_starts, None, lengths, causal, lists=lists)


def _longest(part: PagedPart) -> Tensor:
    """int32 [1], for `seq_lens`. FlashInfer's plan takes the maximum of these lengths, 0.6.18 one element at a time in
    Python, which is milliseconds for all of them. Its "fa2" planner and kernels do not read them, but the lists; the
    planner of "fa3" reads every one.

    The prefill wrapper's max_sequence_kv= is no other way: with it, plan of 0.6.18 raises UnboundLocalError."""
    return part.kv_lengths.amax(0, keepdim=True)


def _is_decode(part: PagedPart) -> bool:
    """Whether each segment has exactly one row: then whether the part is causal makes no difference."""
    return part.num_rows == len(part.kv_lengths) and bool((part.query_starts[1:] > part.query_starts[:-1]).all())
