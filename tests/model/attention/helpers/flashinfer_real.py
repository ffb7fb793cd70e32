"""Our backend over FlashInfer's real Python wrappers, on a CPU; prints JSON.

`python -m tests.model.attention.helpers.flashinfer_real PACKAGE NEEDS`, two directories.

The compiled modules are stubs: they look up the module's name, which raises for dtypes that FlashInfer lacks, plan by
FlashInfer's own planners and compute nothing. Allocations of pinned memory are plain ones.
"""

import contextlib
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
from tokasaurus.model import buffer_sizes
from tokasaurus.model.attention import flashinfer_backend
from tokasaurus.model.attention.backend import BlockLists, KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.block_lists import in_recorded
from tokasaurus.model.attention.row_split import attend_rows
from tokasaurus.model.worker.hydragen_costs import measure_costs

HEADS = ((32, 8, 64), (32, 8, 128), (9, 3, 64), (28, 4, 128), (40, 8, 128), (64, 8, 128))
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
    return PagedPart(0, num_rows, rows, None, part.kv_lengths, causal=False, is_partial=True, lists=part.lists)


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


fa3_plans: list[list[int]] = []
"""Lengths that the planner of fa3 was given, by plan."""


def plan_fa3(*args: Any) -> list[int]:
    """In place of PrefillSM90Plan, which has 16 parameters and reads the length of each of its segments."""
    assert len(args) == 16
    lengths, num_segments = args[5], args[7]
    assert (lengths.dtype, len(lengths), lengths.device) == (torch.int32, num_segments, CPU)
    fa3_plans.append(lengths.tolist())
    return [0] * 9


def stub_modules(flashinfer: Any, planner: HostPlanner, on_run: Callable[[], object] = lambda: None) -> None:
    from flashinfer.jit import attention

    def prefill_module(backend: str, *args: Any) -> Any:
        attention.get_batch_prefill_uri(backend, *args)
        plan = plan_fa3 if backend == "fa3" else planner.plan
        return SimpleNamespace(plan=plan, paged_run=lambda *_args: on_run())

    def decode_module(*args: Any) -> Any:
        attention.get_batch_decode_uri(*args)
        return SimpleNamespace(plan=planner.plan_decode, run=lambda *_args: on_run())

    for module in (flashinfer.decode, flashinfer.prefill):
        module.get_batch_prefill_module = prefill_module
        if hasattr(module, "get_batch_decode_module"):
            module.get_batch_decode_module = decode_module


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
        wrapper = backend._planned[id(part)]
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


def refused_output(flashinfer: Any, shape: KVShape) -> str:
    """What the stubs do with the output in float32 that partial parts once asked for."""
    backend = flashinfer_backend.FlashInferBackend(shape, flashinfer)
    part = decode_part(16, seed=0)
    try:
        backend._plan_rows(backend._new_decode().plan, part, o_data_type=torch.float32)
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
    backend.workspace_bytes = lambda shape, _number, rows=0: real_bytes(shape, NUM_PROCESSORS, rows)
    with tempfile.TemporaryDirectory() as directory:
        planner = HostPlanner(Path(package), Path(directory))
        stub_modules(flashinfer, planner)
        found: dict[str, Any] = {}
        for heads in HEADS:
            for num_rows in ROWS:
                planner.sizes = [0, 0]
                shape = KVShape(1, *heads, PAGE_SIZE, torch.bfloat16, CPU)
                found["/".join(map(str, heads)) + f" {num_rows}"] = check(shape, num_rows, flashinfer, planner)
        found["fa3"] = fa3_lengths(flashinfer, KVShape(1, *HEADS[0], PAGE_SIZE, torch.bfloat16, CPU), [40, 3, 200])
        found["refused"] = refused_output(flashinfer, KVShape(1, *HEADS[0], PAGE_SIZE, torch.bfloat16, CPU))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
