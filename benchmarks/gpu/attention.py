"""Attention of decode rows, and over a shared prefix, beside the device's own speed: prints rows of JSON.

python -m benchmarks.gpu.attention --device cuda [--backend flashinfer] [--tiny]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import AttentionBackend, KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.block_lists import as_in_steps
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.cpu.bindings import load_kernels

PAGE_SIZE = 16
_ROUNDS, _WARM_ROUNDS = 20, 3


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of what is measured. The heads are those of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    """Layers in turn, so that no cache keeps a layer's keys and values."""
    num_rows: int
    """Decode rows."""
    num_tokens: int
    """Context of each decode row."""
    num_prefix_rows: int
    num_prefix_tokens: int
    copied_bytes: int
    matmul_size: int
    """Rows and columns of the matrices whose product is the device's rate."""


LLAMA_8B = Case(32, 8, 128, 2, 256, 4096, 1024, 4096, 1 << 30, 8192)
TINY = Case(4, 2, 16, 2, 4, 64, 8, 64, 1 << 16, 64)


def measure(device: torch.device, backend: str | None, case: Case) -> Iterator[dict[str, Any]]:
    """Bytes of keys and values that decode rows read per second, floating-point operations per second of the prefix
    part, and shares of what the device reaches in a copy and in a matrix product: each as soon as it is measured."""
    dtype = torch.bfloat16
    shape = KVShape(case.num_layers, case.num_heads, case.num_kv_heads, case.head_dim, PAGE_SIZE, dtype, device, dtype)
    num_blocks = case.num_rows * case.num_tokens // PAGE_SIZE
    attention = make_backend(backend, shape, load_kernels() if device.type == "cpu" else None)
    attention.allocate(num_blocks + 1)
    _fill(attention, shape, num_blocks)
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).int() + 1
    decode = _part(blocks.view(case.num_rows, -1), 1, case.num_tokens, causal=True)
    prefix_blocks = blocks[: case.num_prefix_tokens // PAGE_SIZE].view(1, -1)
    prefix = _part(prefix_blocks, case.num_prefix_rows, case.num_prefix_tokens, causal=False)
    yield {"backend": type(attention).__name__}
    decode_s = _seconds(device, _attend(attention, shape, decode)) / case.num_layers
    decode_rate = case.num_rows * case.num_tokens * shape.bytes_per_block / PAGE_SIZE / case.num_layers / decode_s
    yield {"decode_bytes_per_s": decode_rate}
    prefix_s = _seconds(device, _attend(attention, shape, prefix)) / case.num_layers
    prefix_rate = 4 * case.num_prefix_rows * case.num_prefix_tokens * case.num_heads * case.head_dim / prefix_s
    yield {"prefix_flop_per_s": prefix_rate}

    source, target = (torch.zeros(case.copied_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    copy_rate = 2 * case.copied_bytes / _seconds(device, lambda: target.copy_(source))
    yield {"copy_bytes_per_s": copy_rate, "decode_share": decode_rate / copy_rate}
    left, right = torch.randn(2, case.matmul_size, case.matmul_size, device=device).to(dtype).unbind()
    matmul_rate = 2 * case.matmul_size**3 / _seconds(device, lambda: left @ right)
    yield {"matmul_flop_per_s": matmul_rate, "prefix_share": prefix_rate / matmul_rate}


def _fill(attention: AttentionBackend, shape: KVShape, num_blocks: int) -> None:
    """Random keys and values in every block but the padding block."""
    kv_indices = torch.arange(PAGE_SIZE, (num_blocks + 1) * PAGE_SIZE, device=shape.device)
    attention.plan(PagedLayout(kv_indices, ()))
    for layer in range(shape.num_layers):
        size = len(kv_indices), shape.num_kv_heads, shape.head_dim
        key, value = (torch.randn(size, dtype=shape.query_dtype, device=shape.device) for _ in range(2))
        attention.write(key, value, layer)


def _part(tables: Tensor, num_rows: int, num_tokens: int, causal: bool) -> PagedPart:
    """num_rows query rows for each of the block tables, int32 [S, blocks]."""
    count = len(tables)
    starts = torch.arange(count + 1, dtype=torch.int32) * num_rows
    lengths = torch.full((count,), num_tokens, dtype=torch.int32)
    return PagedPart(0, num_rows * count, starts, tables, lengths, causal, is_partial=not causal)


def _attend(attention: AttentionBackend, shape: KVShape, part: PagedPart) -> Callable[[], object]:
    """Attention of all layers; the plan, once per forward, is not a part of it."""
    layout = as_in_steps(PagedLayout(torch.zeros(0, dtype=torch.int64), (part,)), attention, shape)
    (part,) = layout.parts
    query = torch.randn(part.num_rows, shape.num_heads, shape.head_dim, device=shape.device).to(shape.query_dtype)

    def run() -> None:
        for layer in range(shape.num_layers):
            attention.attend(query, layer, part)

    attention.plan(layout)
    return run


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median time of a call: on the device's own clock, if it has one."""
    times: list[float] = []
    for _ in range(_WARM_ROUNDS + _ROUNDS):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            work()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1000)
        else:
            began_s = time.perf_counter()
            work()
            times.append(time.perf_counter() - began_s)
    return statistics.median(times[_WARM_ROUNDS:])


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.attention", description="Prints rows of JSON.")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--backend", help="default: as the server chooses")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a look at the program")
    args = parser.parse_args(argv)
    with torch.inference_mode():
        for row in measure(torch.device(args.device), args.backend, TINY if args.tiny else LLAMA_8B):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
