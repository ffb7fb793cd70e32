"""Benchmarks the CPU gemm kernels against torch and the machine's read bandwidth, in every instruction set.

`python -m benchmarks.kernels.gemm [--check]`
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

import tokasaurus.model  # noqa: F401 - makes thread settings that torch reads on import
from benchmarks.results import Check, add_result_arguments, at_least, begin_results, end_results, make_console
from tokasaurus.commands.bench.results import machine_facts

ROWS = (1, 8, 64, 512)
IN_SIZE, OUT_SIZE = 576, 1536
NUM_WEIGHTS = 42_000_000
"""At least so many are multiplied one after the other, too large for most caches together: they come from memory."""

TORCH_ENVIRONMENT = {
    "avx2_vnni": {
        "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
    "avx512_vnni": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ATEN_CPU_CAPABILITY": "avx512",
    },
    "avx512": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ATEN_CPU_CAPABILITY": "avx512",
    },
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}
"""Environment variables that restrict torch to an instruction set, by cpu_isa."""

OURS_FLOAT32, OURS_BFLOAT16 = "ours float32", "ours bfloat16"
TORCH_FLOAT32, TORCH_BFLOAT16 = "torch float32", "torch bfloat16"
BLOCK_TYPES = (("Q8_0", False), ("Q4_1", False), ("Q8_0", True), ("Q4_1", True), ("I8", True))
"""Of quantised weights, and whether they are multiplied in integers; else as they are, unrounded."""

MIN_OVER_TORCH = {8: 1.8, 64: 1.2, 512: 1.0}
MIN_SHARE_OF_READ, MIN_OVER_TORCH_ONE_ROW = 0.85, 1.3
MIN_BFLOAT16_OVER_FLOAT32 = {1: 1.6, 64: 0.85, 512: 0.85}


@dataclass(frozen=True, slots=True)
class Level:
    """Measured speed with one instruction set."""

    cpu_isa: str
    gflops: dict[str, dict[int, float]]
    """GFLOP/s by implementation, then by number of rows."""
    read: float
    """GB/s of a plain read of memory."""

    @property
    def streamed(self) -> float:
        """GB/s at which our gemm of one row reads float32 weights."""
        return self.gflops[OURS_FLOAT32][1] * 2  # two floating-point operations for each weight of four bytes


def measure(cpu_isa: str, num_rounds: int, in_size: int, out_size: int) -> Level:
    """Measure in this process. TORCH_ENVIRONMENT[cpu_isa] must have been set before torch was imported."""
    import torch
    from gguf import GGMLQuantizationType, quantize

    from benchmarks.kernels.attention_cases import reads, time_interleaved
    from tokasaurus.model.cpu.bindings import load_kernels
    from tokasaurus.model.cpu.layer_executor import BlockRows, BlockWeight, LayerKernels, PackedWeights
    from tokasaurus.model.decoder.quantize import quantized as quantized_at_load

    def quantized(weight: torch.Tensor, kind: str, is_int8: bool) -> PackedWeights:
        if kind == "I8":
            rows = quantized_at_load(weight, "int8")
        else:
            rows = BlockRows(kind, torch.from_numpy(quantize(weight.numpy(), GGMLQuantizationType[kind])))
        return PackedWeights(layer_kernels, BlockWeight(in_size, torch.bfloat16, (rows,), is_int8), None)

    kernels = load_kernels(cpu_isa)
    assert kernels is not None
    layer_kernels = LayerKernels(kernels)
    plain = [torch.randn(out_size, in_size) for _ in range(-(-NUM_WEIGHTS // (in_size * out_size)))]
    rounded = [weight.bfloat16() for weight in plain]
    ours = [PackedWeights(layer_kernels, weight, None) for weight in plain]
    ours_rounded = [PackedWeights(layer_kernels, weight, None) for weight in rounded]
    blocks = {
        f"ours {kind}{' int8' if is_int8 else ''}": [quantized(weight, kind, is_int8) for weight in plain]
        for kind, is_int8 in BLOCK_TYPES
    }
    names = (OURS_FLOAT32, OURS_BFLOAT16, *blocks, TORCH_FLOAT32, TORCH_BFLOAT16)
    gflops: dict[str, dict[int, float]] = {name: {} for name in names}

    def linear(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.nn.functional.linear(x, weight)

    def packed(x: torch.Tensor, weight: PackedWeights) -> Callable[[], object]:
        return lambda: weight.multiply(x)

    read = 0.0
    with torch.inference_mode():
        for num_rows in ROWS:
            x = torch.randn(num_rows, in_size)
            candidates: dict[str, Sequence[Callable[[], object]]] = {
                OURS_FLOAT32: [packed(x, weight) for weight in ours],
                TORCH_FLOAT32: [linear(x, weight) for weight in plain],
                OURS_BFLOAT16: [packed(x.to(weight.activation_dtype), weight) for weight in ours_rounded],
                TORCH_BFLOAT16: [linear(x.bfloat16(), weight) for weight in rounded],
            }
            for name, weights in blocks.items():
                candidates[name] = [packed(x.to(weight.activation_dtype), weight) for weight in weights]
            if num_rows == 1:
                candidates["read"], read_bytes = reads(num_megabytes=256)
            seconds = time_interleaved(candidates, num_rounds)
            if num_rows == 1:
                read = read_bytes / seconds["read"] / 1e9
            for name in names:
                gflops[name][num_rows] = 2 * num_rows * in_size * out_size / seconds[name] / 1e9
    return Level(cpu_isa, gflops, read)


def measure_in_child(cpu_isa: str, args: argparse.Namespace) -> Level:
    """Measure in a new process, since torch reads TORCH_ENVIRONMENT only when it is imported."""
    command = [sys.executable, "-m", "benchmarks.kernels.gemm", "--child", cpu_isa, "--rounds", str(args.rounds)]
    command += ["--weights", *map(str, args.weights)]
    environment = os.environ | TORCH_ENVIRONMENT.get(cpu_isa, {})
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = json.loads(output.splitlines()[-1])
    gflops = {name: {int(rows): value for rows, value in by_rows.items()} for name, by_rows in found["gflops"].items()}
    return Level(found["cpu_isa"], gflops, found["read"])


def machine_levels() -> list[str]:
    """Values of cpu_isa for which this machine has kernels, the best first."""
    from tokasaurus.model.cpu.build import machine_sets

    return list(dict.fromkeys(level.cpu_isa for level in machine_sets()))


def check_level(level: Level) -> list[Check]:
    def ratio(name: str, over: str, num_rows: int) -> float:
        return level.gflops[name][num_rows] / level.gflops[over][num_rows]

    what = f"{level.cpu_isa}:"
    checks = [
        at_least(f"{what} float32 over torch, {rows} rows", ratio(OURS_FLOAT32, TORCH_FLOAT32, rows), limit)
        for rows, limit in MIN_OVER_TORCH.items()
    ]
    # One row must meet one of two limits: each figure is divided by its limit, and the larger result must be 1.
    best_over_limit = max(
        level.streamed / level.read / MIN_SHARE_OF_READ,
        ratio(OURS_FLOAT32, TORCH_FLOAT32, 1) / MIN_OVER_TORCH_ONE_ROW,
    )
    name = f"{what} float32, 1 row: share of read bandwidth / {MIN_SHARE_OF_READ}, or over torch / "
    checks.append(at_least(f"{name}{MIN_OVER_TORCH_ONE_ROW}", best_over_limit, 1.0))
    return checks + [
        at_least(f"{what} bfloat16 weights over float32, {rows} rows", ratio(OURS_BFLOAT16, OURS_FLOAT32, rows), limit)
        for rows, limit in MIN_BFLOAT16_OVER_FLOAT32.items()
    ]


def print_level(level: Level, weights: Sequence[int], console: Console) -> None:
    console.print(
        f"\n{level.cpu_isa}: GFLOP/s of gemms with weights of {weights[0]} x {weights[1]}, read from memory; "
        f"our float32 gemm of one row reads {level.streamed:.1f} GB/s, a plain read {level.read:.1f} GB/s",
        soft_wrap=True,
    )
    table = Table("", *(f"{rows} rows" for rows in ROWS))
    for name, by_rows in level.gflops.items():
        table.add_row(name, *(f"{by_rows[rows]:.1f}" for rows in ROWS))
    console.print(table)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.gemm", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--cpu-isa", nargs="+", metavar="NAME", help="instruction sets (default: all of this machine)")
    parser.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="measured rounds over all implementations (default: 15)"
    )
    parser.add_argument(
        "--weights", type=int, nargs=2, default=[IN_SIZE, OUT_SIZE], metavar=("IN", "OUT"), help="(default: 576 1536)"
    )
    add_result_arguments(parser)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if --check was given and a limit was missed, otherwise 0."""
    args = parse(argv)
    if args.child is not None:
        print(json.dumps(dataclasses.asdict(measure(args.child, args.rounds, *args.weights))))
        return 0
    console = make_console(120)
    found = begin_results(args, machine_facts("torch"), console) | {"levels": []}
    checks: list[Check] = []
    for cpu_isa in args.cpu_isa or machine_levels():
        level = measure_in_child(cpu_isa, args)
        print_level(level, args.weights, console)
        found["levels"].append(level)
        checks += check_level(level)
    return end_results(found, checks, args, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
