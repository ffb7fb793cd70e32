"""Our backend over FlashInfer's real Python wrappers, on a CPU; prints JSON.

`python -m tests.model.attention.helpers.flashinfer_real PACKAGE NEEDS`, two directories.

The compiled modules are stubs: they look up the module's name, which raises for dtypes that FlashInfer lacks, plan by
FlashInfer's own planners and compute nothing. Allocations of pinned memory are plain ones.
"""

import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.model.attention.helpers.flashinfer_planner import NUM_PROCESSORS, OCCUPANCY, HostPlanner
from tests.model.helpers.paged_problems import CPU
from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.model import buffer_sizes
from tokasaurus.model.attention import flashinfer_backend
from tokasaurus.model.attention.backend import BlockLists, KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.block_lists import in_recorded, lists_in
from tokasaurus.model.attention.row_split import attend_rows
from tokasaurus.model.worker.hydragen_costs import measure_costs

HEADS = ((32, 8, 64), (32, 8, 128), (9, 3, 64), (28, 4, 128), (40, 8, 128), (64, 8, 128))
KIND_HEADS = ((32, 8, 64), (9, 3, 64))
WINDOW = 300
ROWS = (16, 1024)
PROMPT_ROWS = (8192, 40960)
PAGE_SIZE = 16
MAX_BLOCKS = 64
NUM_CONTEXTS = 40
OCCUPANCIES = (1, 7, 16)
"""Blocks of the CUDA-core kernel on each multiprocessor, besides the planner's 9: other devices and compilers."""


def decode_part(num_rows: int, seed: int, is_partial: bool = False) -> PagedPart:
    """Rows with random contexts of up to MAX_BLOCKS blocks."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, MAX_BLOCKS * PAGE_SIZE, (num_rows,), generator=generator, dtype=torch.int32)
    counts = (lengths + PAGE_SIZE - 1) // PAGE_SIZE
    starts = torch.zeros(num_rows + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    rows = torch.arange(num_rows + 1, dtype=torch.int32)
    blocks = torch.ones(int(starts[-1]), dtype=torch.int32)
    lists = BlockLists(starts, starts.clone(), blocks, lengths - (counts - 1) * PAGE_SIZE, rows, lengths)
    return PagedPart(0, num_rows, rows, None, lengths, causal=True, is_partial=is_partial, lists=lists)


def prefix_part(num_rows: int) -> PagedPart:
    """All rows behind one prefix."""
    part = decode_part(1, seed=9, is_partial=True)
    rows = torch.tensor([0, num_rows], dtype=torch.int32)
    assert part.lists is not None
    lists = replace(part.lists, query_starts=rows)
    return PagedPart(0, num_rows, rows, None, part.kv_lengths, causal=False, is_partial=True, lists=lists)


def prompts_part(lengths: list[int]) -> PagedPart:
    """Whole prompts of these lengths, in blocks of their own."""
    kv_lengths = torch.tensor(lengths, dtype=torch.int32)
    rows, starts = (torch.zeros(len(lengths) + 1, dtype=torch.int32) for _ in range(2))
    rows[1:], starts[1:] = kv_lengths.cumsum(0), ((kv_lengths + PAGE_SIZE - 1) // PAGE_SIZE).cumsum(0)
    blocks = torch.ones(int(starts[-1]), dtype=torch.int32)
    lists = BlockLists(starts, starts.clone(), blocks, (kv_lengths - 1) % PAGE_SIZE + 1, rows, kv_lengths)
    return PagedPart(0, int(rows[-1]), rows, None, kv_lengths, causal=True, lists=lists)


def without_a_device() -> None:
    """Lets the wrappers run on a CPU: pinned memory is plain memory."""
    real_empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **options: real_empty(*args, **options)  # noqa: ARG005
    torch.cuda.device = lambda _device: contextlib.nullcontext()  # type: ignore[assignment,misc,return-value]


modules: list[tuple[str, list[bool]]] = []
"""Kernels of each module that was asked for, and whether with a window, and with a cap."""

fa3_plans: list[list[int]] = []
"""Lengths that the planner of fa3 was given, by plan."""


def plan_fa3(*args: Any) -> list[int]:
    """In place of PrefillSM90Plan, which has 16 parameters and reads the length of each of its segments."""
    assert len(args) == 16
    lengths, num_segments = args[5], args[7]
    assert (lengths.dtype, len(lengths), lengths.device) == (torch.int32, num_segments, CPU)
    fa3_plans.append(lengths.tolist())
    return [0] * 9


def stub_modules(
    flashinfer: Any,
    planner: HostPlanner,
    on_run: Callable[..., object] = lambda *_: None,
    on_plan: Callable[..., object] = lambda *_: None,
) -> None:
    """In the place of the compiled modules; FlashInfer's Python around these stays. on_run, on_plan: called with the
    arguments of each."""

    def noted(plan: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            on_plan(*args)
            return plan(*args)

        return call

    def prefill_module(backend: str, *args: Any) -> Any:
        modules.append((backend, [arg for arg in args if isinstance(arg, bool)][:2]))
        plan = noted(plan_fa3 if backend == "fa3" else lambda *args: planner.noted(*args))
        module = SimpleNamespace(plan=plan, paged_run=on_run, ragged_run=None)
        return SimpleNamespace(build_and_load=lambda: module)

    def decode_module(*args: Any) -> Any:
        modules.append(("decode", [arg for arg in args if isinstance(arg, bool)]))
        module = SimpleNamespace(plan=noted(planner.plan_decode), run=on_run)
        return SimpleNamespace(build_and_load=lambda: module)

    flashinfer.decode.gen_batch_decode_module = decode_module
    for name in ("gen_batch_prefill_module", "_gen_batch_prefill_primary_module"):
        if hasattr(flashinfer.prefill, name):
            setattr(flashinfer.prefill, name, prefill_module)
    flashinfer.prefill._gen_batch_prefill_independent_paged_module = lambda *_args: None


def check_prompts(backend: Any, planner: HostPlanner, num_rows: int) -> dict[str, Any]:
    """Plans of this many rows, the last with nearly as many tiles as there can be: one prompt is long, the others have
    a row each, so that the mean just makes large tiles."""
    group = backend._shape.num_heads // backend._shape.num_kv_heads
    num_short = num_rows * group // 65
    problems = ([num_rows], [num_rows // 512] * 512, [1] * num_short + [num_rows - num_short])
    asked = 0
    for lengths in problems:
        part = prompts_part(lengths)
        backend.plan(PagedLayout(torch.zeros(num_rows, dtype=torch.int64), (part,)))
        asked = max(asked, planner.sizes[1])
        wrapper = backend._planned[id(part), 0]
    assert len(wrapper._pin_memory_int_workspace_buffer) == len(wrapper._int_workspace_buffer)
    return {"asked": asked, "plan_memory": len(wrapper._int_workspace_buffer)}


def record(backend: Any, planner: HostPlanner, num_rows: int, query: Tensor, num_contexts: int) -> dict[str, Any]:
    """Steps of one recording, each with other contexts."""
    memory = backend.prepare_recording(num_rows, MAX_BLOCKS)
    output = torch.zeros_like(query)
    kv_indices = torch.zeros(num_rows, dtype=torch.int64)
    plans, times_s, asked = [], [], [0, 0]
    for seed in range(num_contexts):
        part = decode_part(num_rows, seed)
        layout = in_recorded(PagedLayout(kv_indices, (part,)), memory)
        part = layout.parts[0]
        began_s = time.perf_counter()
        backend.plan_recorded(layout)
        times_s.append(time.perf_counter() - began_s)
        wrapper: Any = next(iter(backend._planned.values()))
        assert not backend._planned_calls, "they are of other parts, whose ids these may have"
        plans.append(list(wrapper._plan_info))
        asked = [max(pair) for pair in zip(asked, planner.sizes, strict=True)]
        assert part.lists is not None
        assert torch.equal(wrapper._paged_kv_indptr_buf, part.lists.starts)
        assert torch.equal(wrapper._paged_kv_last_page_len_buf, part.lists.last_lengths)
        assert torch.equal(wrapper._paged_kv_indices_buf[: len(part.lists.blocks)], part.lists.blocks)
        recorded, _ = backend.attend(query, 0, part, output)
        assert recorded.data_ptr() == output.data_ptr()
    return {
        "same_plans": all(plan == plans[0] for plan in plans),
        "asked": asked,
        "plan_memory": len(wrapper._int_workspace_buffer),
        "plan_ms": 1e3 * statistics.median(times_s[1:]),
    }


def prefixes_part(num_rows: int, num_segments: int, seed: int) -> PagedPart:
    """As the part of a recording with prefix groups: of random groups, or one without tokens that has all rows."""
    generator = torch.Generator().manual_seed(seed)
    sizes, counts = (torch.zeros(num_segments, dtype=torch.int32) for _ in range(2))
    if seed == 0:
        sizes[0] = num_rows
    else:
        num_groups = int(torch.randint(1, num_segments + 1, (1,), generator=generator))
        ends = torch.randint(1, num_rows + 1, (num_groups,), generator=generator).sort().values
        sizes[:num_groups] = ends.diff(prepend=torch.zeros(1))
        counts[:num_groups] = torch.randint(1, MAX_BLOCKS, (num_groups,), generator=generator)
    starts, rows = (torch.zeros(num_segments + 1, dtype=torch.int32) for _ in range(2))
    starts[1:], rows[1:] = counts.cumsum(0), sizes.cumsum(0)
    blocks, lengths = torch.ones(int(starts[-1]), dtype=torch.int32), counts * PAGE_SIZE
    lists = BlockLists(starts, starts.clone(), blocks, torch.where(counts > 0, PAGE_SIZE, 0).int(), rows, lengths)
    return PagedPart(0, int(rows[-1]), rows, None, lengths, causal=False, is_partial=True, lists=lists)


def record_groups(backend: Any, planner: HostPlanner, num_rows: int, query: Tensor) -> dict[str, Any]:
    """Steps of one recording with prefix groups. The first is the one that is recorded."""
    memory = backend.prepare_recording(num_rows, MAX_BLOCKS)
    num_groups = buffer_sizes.max_graph_groups(num_rows, num_rows)
    prefixes = backend.prepare_groups(num_groups)
    planned, plans, times_s, asked = planner.plan, list[list[int]](), list[float](), [0, 0]

    def noted(*args: Any) -> list[int]:
        nonlocal asked
        plan = planned(*args)
        if args[7] == num_groups:
            plans.append(plan)
        asked = [max(pair) for pair in zip(asked, planner.sizes, strict=True)]
        return plan

    planner.noted = noted
    for seed in range(NUM_CONTEXTS):
        part, prefix = decode_part(num_rows, seed, is_partial=True), prefixes_part(num_rows, num_groups, seed)
        layout = in_recorded(PagedLayout(torch.zeros(num_rows, dtype=torch.int64), (part,), prefix), memory)
        assert prefix.lists is not None
        lists = lists_in(prefixes, prefix.lists)
        for name in ("starts", "blocks", "last_lengths"):
            getattr(lists, name).copy_(getattr(prefix.lists, name))
        layout = replace(layout, prefix=replace(prefix, lists=lists))
        began_s = time.process_time()
        backend.plan_recorded(layout)
        times_s.append(time.process_time() - began_s)
        assert layout.prefix is not None
        wrapper = backend._planned[id(layout.prefix), 0]
        assert torch.equal(wrapper._qo_indptr_buf, prefix.query_starts)
        assert torch.equal(wrapper._paged_kv_indptr_buf, prefix.lists.starts)
        assert torch.equal(wrapper._paged_kv_last_page_len_buf, prefix.lists.last_lengths)
        for layer in range(backend._shape.num_layers if seed == 0 else 0):
            attended = attend_rows(backend, query, layer, layout)
            assert attended.shape == query.shape
    planner.noted = planned
    return {
        "same_plans": len(plans) == NUM_CONTEXTS * len(backend._kinds) and all(plan == plans[0] for plan in plans),
        "asked": asked,
        "plan_memory": len(wrapper._int_workspace_buffer),
        "plan_ms": 1e3 * statistics.median(times_s[1:]),
    }


def time_groups(backend: Any, shape: KVShape, num_rows: int) -> dict[str, float]:
    """Host time of a step of which two rows share a prefix: its plan, and attention of a layer, in three calls. The
    merge is left out: plain torch computes it here, where on CUDA a kernel is launched."""
    grouped, others = decode_part(2, seed=1, is_partial=True), decode_part(num_rows - 2, seed=2)
    layout = PagedLayout(
        torch.zeros(num_rows, dtype=torch.int64), (grouped, replace(others, first_row=2)), prefix_part(2)
    )
    query = torch.zeros((num_rows, shape.num_heads, shape.head_dim), dtype=shape.query_dtype)
    output = torch.empty_like(query)
    backend.merge = lambda *_arguments: None
    plans_s, layers_s = [], []
    for _ in range(40):
        began_s = time.perf_counter()
        backend.plan(layout)
        plans_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        attend_rows(backend, query, 0, layout, output)
        layers_s.append(time.perf_counter() - began_s)
    del backend.merge
    return {"plan_ms": 1e3 * statistics.median(plans_s), "layer_ms": 1e3 * statistics.median(layers_s)}


def check(shape: KVShape, num_rows: int, flashinfer: Any, planner: HostPlanner) -> dict[str, Any]:
    backend = flashinfer_backend.FlashInferBackend(shape, flashinfer, max_graph_rows=num_rows)
    backend.prepare_calls()
    backend.allocate(2)
    query = torch.zeros((num_rows, shape.num_heads, shape.head_dim), dtype=shape.query_dtype)
    kv_indices = torch.zeros(num_rows, dtype=torch.int64)
    suffix, prefix = decode_part(num_rows, seed=0, is_partial=True), prefix_part(num_rows)
    backend.plan(PagedLayout(kv_indices, (suffix,), prefix))
    partial = [backend.attend(query, 0, part) for part in (suffix, prefix)]
    whole = decode_part(num_rows, seed=0)
    backend.plan(PagedLayout(kv_indices, (whole,)))
    output = torch.zeros_like(query)
    eager, _ = backend.attend(query, 0, whole, output)
    recorded = record(backend, planner, num_rows, query, NUM_CONTEXTS)
    on_cuda_cores = shape.num_heads // shape.num_kv_heads < 4
    for blocks in OCCUPANCIES if on_cuda_cores else ():
        planner.blocks_per_processor = blocks
        other = record(backend, planner, num_rows, query, num_contexts=10)
        recorded["asked"] = [max(pair) for pair in zip(recorded["asked"], other["asked"], strict=True)]
        recorded["same_plans"] &= other["same_plans"]
    planner.blocks_per_processor = OCCUPANCY
    eager_s = []
    for seed in range(40):
        part = decode_part(num_rows, seed)
        layout = PagedLayout(kv_indices, (part,))
        began_s = time.perf_counter()
        backend.plan(layout)
        eager_s.append(time.perf_counter() - began_s)
    backend.allocate(601)
    with torch.inference_mode():
        costs = measure_costs(backend, shape, 600, max_rows=16)
    prompts = {size: check_prompts(backend, planner, size) for size in PROMPT_ROWS}
    return {
        "dtypes": sorted({str(x.dtype) for x, _ in partial} | {str(eager.dtype)}),
        "lse": [str(lse.dtype) for _, lse in partial if lse is not None],
        **recorded,
        "workspace": len(backend._workspace),
        "eager_plan_ms": 1e3 * statistics.median(eager_s),
        "costs": asdict(costs),
        "groups": time_groups(backend, shape, num_rows),
        "recorded_groups": record_groups(backend, planner, num_rows, query),
        "prompts": prompts,
    }


def fa3_lengths(flashinfer: Any, shape: KVShape, lengths: list[int]) -> list[int]:
    """What fa3's planner gets of prompts of these lengths, which are then run."""
    backend = flashinfer_backend.FlashInferBackend(shape, flashinfer)
    backend.prepare_fa3()
    backend.allocate(2)
    part = prompts_part(lengths)
    backend.plan(PagedLayout(torch.zeros(0, dtype=torch.int64), (part,)))
    query = torch.zeros(part.num_rows, shape.num_heads, shape.head_dim, dtype=shape.dtype)
    backend.attend(query, 0, part, torch.zeros_like(query))
    return fa3_plans[-1]


def plain(argument: Any, addresses: dict[int, str]) -> Any:
    """An argument of a compiled function, as what the same function is given by another way can be compared with.

    addresses: names of memory that the kernels write."""
    if not isinstance(argument, Tensor):
        return argument if isinstance(argument, list) else (type(argument).__name__, argument)
    if argument.dtype == torch.int32:
        return argument.tolist()
    return addresses.get(argument.data_ptr(), argument.data_ptr()), argument.dtype, argument.shape, argument.stride()


def calls_by_both_ways(
    flashinfer: Any, shape: KVShape, heard: list[Any], numbers: dict[int, list[float]] | None = None
) -> dict[str, int]:
    """Compares what the compiled functions are given by the wrappers and without them -> number of compared calls, by
    kind of part. heard: what the stubs are given is added here. numbers: the kernels' ones are added here, by layer."""
    backend: Any = flashinfer_backend.FlashInferBackend(shape, flashinfer, max_graph_rows=16)
    if backend.computes_by_fa3:
        backend.prepare_fa3()
    backend.prepare_calls()
    backend.allocate(2)
    calls, compared, none = backend._calls, dict[str, int](), dict[str, Any]()
    grouped = PagedLayout(torch.zeros(0), (decode_part(5, seed=3, is_partial=True),), prefix_part(5))
    layouts = {
        "decode and prompts": PagedLayout(torch.zeros(0), (decode_part(7, seed=1), prompts_part([40, 3, 200]))),
        "groups and prompts": replace(grouped, parts=(*grouped.parts, decode_part(2, seed=4), prompts_part([90]))),
        "one row": PagedLayout(torch.zeros(0), (decode_part(1, seed=2),)),
    }
    if not backend.computes_groups:
        del layouts["groups and prompts"]
    for name, layout in layouts.items():
        for uses_fa3 in (True, False)[not backend.computes_by_fa3 :]:
            backend.uses_fa3 = uses_fa3
            found = []
            for chosen in (none, calls):
                backend._calls, backend._next_set = chosen, 0
                heard.clear()
                backend.plan(layout)
                parts = (*layout.parts, *([] if layout.prefix is None else [layout.prefix]))
                for part, layer in itertools.product(parts, range(shape.num_layers)):
                    query = torch.zeros(part.num_rows, shape.num_heads, shape.head_dim, dtype=shape.dtype)
                    output = None if part.is_partial else torch.zeros_like(query)
                    output, lse = backend.attend(query, layer, part, output)
                    if numbers is not None and chosen is none:
                        numbers.setdefault(layer, []).extend(x for x in heard[-1] if isinstance(x, int | float))
                    named = {"query": query, "output": output, "lse": lse}
                    addresses = {x.data_ptr(): key for key, x in named.items() if x is not None}
                    heard[-1] = [plain(argument, addresses) for argument in heard[-1]]
                    has_sinks = backend._sinks[layer] is not None and part is not layout.prefix
                    assert (lse is not None) == (part.is_partial or has_sinks)
                found.append([call if isinstance(call, list) else [plain(x, {}) for x in call] for call in heard])
            for by_wrapper, alone in zip(*found, strict=True):
                # fa2's planner does not read the lengths, of which it gets the longest from us.
                is_plan = len(by_wrapper) in (19, 20)
                assert len(by_wrapper) == len(alone)
                for place, pair in enumerate(zip(by_wrapper, alone, strict=True)):
                    assert pair[0] == pair[1] or (is_plan and place == 5), f"{name}, argument {place}: {pair}"
            compared[f"{name}, {'fa3' if uses_fa3 else 'fa2'}"] = len(found[0])
    return compared


def of_kinds(heads: tuple[int, int, int], window: int | None) -> KVShape:
    """Three layers of two kinds, the last one with sinks."""
    usual = AttentionSpec(*heads, heads[2] ** -0.5)
    limited = replace(usual, scale=0.2, window=window, softcap=20.0)
    sinks = (None, None, torch.zeros(heads[0]))
    return KVShape(3, *heads, PAGE_SIZE, torch.bfloat16, CPU, layers=(usual, limited, usual), sinks=sinks)


def check_kinds(heads: tuple[int, int, int], flashinfer: Any, planner: HostPlanner, heard: list[Any]) -> dict[str, Any]:
    """Layers of two kinds, of which the second has a window; and in prefix groups without it."""
    shape, num_rows, numbers = of_kinds(heads, WINDOW), 64, dict[int, list[float]]()
    modules.clear()
    flashinfer.prefill.get_batch_prefill_module.cache_clear()
    flashinfer.decode.get_batch_decode_module.cache_clear()
    compared = calls_by_both_ways(flashinfer, shape, heard, numbers)
    asked_for = sorted(modules)
    backend: Any = flashinfer_backend.FlashInferBackend(shape, flashinfer, max_graph_rows=num_rows)
    backend.prepare_calls()
    backend.allocate(2)
    memory, plans, asked = backend.prepare_recording(num_rows, MAX_BLOCKS), [], [0, 0]
    query = torch.zeros(num_rows, *heads[::2], dtype=shape.dtype)
    for seed in range(NUM_CONTEXTS):
        layout = in_recorded(
            PagedLayout(torch.zeros(num_rows, dtype=torch.int64), (decode_part(num_rows, seed),)), memory
        )
        backend.plan_recorded(layout)
        asked = [max(pair) for pair in zip(asked, planner.sizes, strict=True)]  # of the last kind's plan
        wrappers = list(backend._planned.values())
        plans.append([list(wrapper._plan_info) for wrapper in wrappers])
        for layer in range(shape.num_layers):
            backend.attend(query, layer, layout.parts[0], torch.zeros_like(query))
    in_groups: Any = flashinfer_backend.FlashInferBackend(of_kinds(heads, None), flashinfer, max_graph_rows=num_rows)
    in_groups.allocate(2)
    return {
        "compared": compared,
        "modules": asked_for,
        "numbers": [sorted(set(numbers[layer])) for layer in range(shape.num_layers)],
        "num_plans": len(wrappers),
        "num_memories": len({wrapper._int_workspace_buffer.data_ptr() for wrapper in wrappers}),
        "same_plans": all(plan == plans[0] for plan in plans),
        "asked": asked,
        "workspace": len(backend._workspace),
        "plan_memory": len(wrappers[-1]._int_workspace_buffer),
        "recorded_groups": record_groups(in_groups, planner, num_rows, query),
    }


def refused_output(flashinfer: Any, shape: KVShape) -> str:
    """What the stubs do with the output in float32 that partial parts once asked for."""
    backend = flashinfer_backend.FlashInferBackend(shape, flashinfer)
    part = decode_part(16, seed=0)
    try:
        backend._plan_rows(backend._new_decode(0).plan, 0, part, o_data_type=torch.float32)
    except KeyError as error:
        return str(error)
    return "nothing"


def main(package: str, needs: str) -> None:
    sys.path[:0] = [package, needs]
    import flashinfer

    without_a_device()
    torch.set_num_threads(1)
    real_bytes = buffer_sizes.workspace_bytes
    backend: Any = flashinfer_backend
    backend.workspace_bytes = lambda shape, _number, *others, **named: real_bytes(
        shape, NUM_PROCESSORS, *others, **named
    )
    with tempfile.TemporaryDirectory() as directory:
        planner = HostPlanner(Path(package), Path(directory))
        heard: list[Any] = []
        stub_modules(flashinfer, planner, *[lambda *args: heard.append(args)] * 2)
        found: dict[str, Any] = {}
        for heads in HEADS:
            for num_rows in ROWS:
                planner.sizes = [0, 0]
                shape = KVShape(1, *heads, PAGE_SIZE, torch.bfloat16, CPU)
                found["/".join(map(str, heads)) + f" {num_rows}"] = check(shape, num_rows, flashinfer, planner)
                heard.clear()
            found["/".join(map(str, heads)) + " calls"] = calls_by_both_ways(flashinfer, shape, heard)
        for heads in KIND_HEADS:
            found["/".join(map(str, heads)) + " kinds"] = check_kinds(heads, flashinfer, planner, heard)
        found["fa3"] = fa3_lengths(flashinfer, KVShape(1, *HEADS[0], PAGE_SIZE, torch.bfloat16, CPU), [40, 3, 200])
        found["refused"] = refused_output(flashinfer, KVShape(1, *HEADS[0], PAGE_SIZE, torch.bfloat16, CPU))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
