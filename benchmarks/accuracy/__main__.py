"""Accuracy of quantised weights and KV caches: errors of log-probabilities and perplexity, by way of computing.

`python -m benchmarks.accuracy [--llama-cpp PYTHON]`. Writes the demo model in each format, scores solved questions of
GSM8K with each, and compares with the same weights dequantised and computed in float32, and with the weights before
they were quantised.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.accuracy import peer
from benchmarks.accuracy.models import (
    EMBEDDING,
    INT4_GROUP,
    Weights,
    read_metadata,
    read_weights,
    round_to_bfloat16,
    round_to_int4,
    round_to_int8,
    shuffle_channels,
    stored_types,
    with_linear_layers,
    write_model,
)
from benchmarks.accuracy.report import Logprobs, Row, check_rows, make_row, perplexity_of, print_rows
from benchmarks.kernels.gemm import TORCH_ENVIRONMENT
from benchmarks.results import add_result_arguments, begin_results, end_results, make_console
from tokasaurus import LLM
from tokasaurus.checkpoint.cache import cache_directory
from tokasaurus.checkpoint.resolve import demo_gguf
from tokasaurus.commands.bench.results import machine_facts
from tokasaurus.commands.bench.workloads import DATA, load_jsonl

BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""The gguf package writes them."""

Flags = dict[str, str]

BLOCK_WAYS: dict[str, Flags] = {
    f"{way}, {dtype}": {"quantized_compute": way, "dtype": dtype}
    for way in ("exact", "int8")
    for dtype in ("float32", "bfloat16")
}


@dataclass(frozen=True, slots=True)
class Source:
    """The weights before they are quantised."""

    weights: Weights
    metadata: dict[str, Any]
    path: Path
    """The same as a GGUF file in F32."""
    logprobs: Logprobs
    token_ids: list[NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class AtLoad:
    """Plain weights that the server rounds while it loads them."""

    name: str
    ways: dict[str, Flags]
    rounded: Callable[[Weights], Weights] | None
    """The weights that this makes of plain ones, computed here. None: they stay as they are."""
    types: str
    bytes_per_weight: float
    """Of the linear layers."""


AT_LOAD = (
    AtLoad(
        "dtype=bfloat16",
        {
            "plain, bfloat16": {"dtype": "bfloat16"},
            "int8 KV cache, bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
            "int8 KV cache, float32": {"dtype": "float32", "kv_cache_dtype": "int8"},
        },
        None,
        "all bfloat16",
        2,
    ),
    AtLoad(
        "quantization=int8",
        {name: flags | {"quantization": "int8"} for name, flags in BLOCK_WAYS.items()},
        lambda weights: with_linear_layers(weights, round_to_int8),
        "linear layers 8 bits with a scale for each output, embedding bfloat16 (float32 with dtype=float32)",
        1,
    ),
    AtLoad(
        "quantization=int4",
        {name: flags | {"quantization": "int4"} for name, flags in BLOCK_WAYS.items()},
        lambda weights: with_linear_layers(weights, round_to_int4),
        f"linear layers 4 bits in groups of {INT4_GROUP}, embedding bfloat16 (float32 with dtype=float32)",
        (INT4_GROUP / 2 + 8) / INT4_GROUP,
    ),
)


def make_texts(num_texts: int) -> list[str]:
    lines = load_jsonl(DATA / "gsm8k_test_200.jsonl")[:num_texts]
    # Without GSM8K's calculator annotations, as in "48/2 = <<48/2=24>>24".
    return [f"Question: {line['question']}\nAnswer: {re.sub('<<.*?>>', '', line['answer'])}" for line in lines]


def score(path: Path, texts: Sequence[str], **flags: Any) -> tuple[Logprobs, list[NDArray[np.int32]]]:
    """Of each text: the log-probabilities of all tokens but the first, and all token ids."""
    with LLM(str(path), kv_cache_num_tokens=8192, show=False, **flags) as llm:
        scores = llm.score([""] * len(texts), texts, progress=False)
    for found in scores:
        if found.error is not None:
            raise SystemExit(f"{path.name} with {flags}: {found.error}")
    return [found.logprobs[1:] for found in scores], [found.token_ids for found in scores]


def measure(
    name: str,
    types: str,
    num_bytes: int,
    path: Path,
    dequantized: Weights | None,
    ways: dict[str, Flags],
    python: str | None,
    source: Source,
    texts: Sequence[str],
) -> list[Row]:
    """A row for each way, after the reference's.

    dequantized: the weights of the file at `path`, or what `ways` make of them; None: the source's. python: llama.cpp's
    interpreter, if it computes with this file too."""
    reference = source.logprobs
    if dequantized is not None:
        reference_path = path.with_name("dequantized.gguf")
        write_model(reference_path, dequantized, source.metadata)
        reference, _ = score(reference_path, texts, dtype="float32")
        reference_path.unlink()
    rows = []

    def add(way: str, logprobs: Logprobs) -> None:
        rows.append(make_row(name, types, num_bytes, way, logprobs, reference, source.logprobs))

    add("dequantised, float32", reference)
    for way, flags in ways.items():
        logprobs, token_ids = score(path, texts, **flags)
        assert all(map(np.array_equal, token_ids, source.token_ids)), f"{name}: other tokens"
        add(way, logprobs)
    if python is not None:
        add("llama.cpp", peer.score(python, path, [ids.tolist() for ids in source.token_ids]))
    return rows


def describe_types(path: Path) -> str:
    found = stored_types(path)
    total = sum(found.values())
    shares = sorted(((count / total, name) for name, count in found.items()), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in shares)


def measure_all(args: argparse.Namespace, directory: Path, console: Console) -> list[Row]:
    texts = make_texts(args.texts)
    python: str | None = args.llama_cpp
    demo = demo_gguf(print)
    metadata = read_metadata(demo)
    # Plain checkpoints are in bfloat16.
    plain = {name: round_to_bfloat16(values) for name, values in read_weights(demo).items()}
    weights = shuffle_channels(plain, metadata, seed=0)
    path = directory / "original.gguf"
    write_model(path, weights, metadata)
    logprobs, token_ids = score(path, texts, dtype="float32")
    source = Source(weights, metadata, path, logprobs, token_ids)
    console.print(
        f"{len(texts)} texts with {sum(map(len, logprobs))} scored tokens; perplexity of the weights before they are "
        f"quantised, in float32: {perplexity_of(logprobs):.4f}",
        soft_wrap=True,
    )
    rows: list[Row] = []

    def is_wanted(name: str) -> bool:
        return args.formats is None or name in args.formats

    if python is not None and is_wanted("F32"):
        found = peer.score(python, path, [ids.tolist() for ids in token_ids])
        num_bytes = sum(values.nbytes for values in weights.values())
        rows.append(make_row("F32", "all F32", num_bytes, "llama.cpp", found, logprobs, logprobs))
    mixtures = () if python is None else tuple(peer.FILE_TYPES)
    for kind in filter(is_wanted, (*BLOCK_TYPES, *mixtures)):
        quantized_path = directory / f"{kind}.gguf"
        if kind in mixtures:
            assert python is not None
            peer.quantize(python, path, quantized_path, kind)
        else:
            write_model(quantized_path, weights, metadata, kind)
        dequantized = read_weights(quantized_path)
        types, num_bytes = describe_types(quantized_path), sum(stored_types(quantized_path).values())
        rows += measure(kind, types, num_bytes, quantized_path, dequantized, BLOCK_WAYS, python, source, texts)
        quantized_path.unlink()
        print_rows(rows[-len(BLOCK_WAYS) - 2 :], console)
    for at_load in AT_LOAD:
        if is_wanted(at_load.name):
            num_bytes = sum(
                int(values.size * (2 if name == EMBEDDING else at_load.bytes_per_weight))
                for name, values in weights.items()
                if values.ndim == 2
            )
            rounded = None if at_load.rounded is None else at_load.rounded(weights)
            found_rows = measure(
                at_load.name, at_load.types, num_bytes, path, rounded, at_load.ways, None, source, texts
            )
            print_rows(found_rows, console)
            rows += found_rows
    return rows


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=(__doc__ or "").splitlines()[0])
    names = [*BLOCK_TYPES, *peer.FILE_TYPES, *(at_load.name for at_load in AT_LOAD)]
    parser.add_argument("--texts", type=int, default=60, metavar="N", help="questions, up to 200 (default: 60)")
    parser.add_argument(
        "--formats", nargs="+", metavar="NAME", choices=["F32", *names], help=f"of {', '.join(names)} (default: all)"
    )
    parser.add_argument(
        "--llama-cpp",
        metavar="PYTHON",
        help="interpreter that has llama-cpp-python: it writes the formats with _K and is measured beside",
    )
    parser.add_argument("--directory", type=Path, metavar="DIR", help="for temporary files of up to 1.5 GB")
    add_result_arguments(parser)
    args = parser.parse_args(argv)
    console = make_console(140)
    versions = {} if args.llama_cpp is None else peer.versions(args.llama_cpp)
    results = begin_results(args, machine_facts("torch", "gguf") | versions, console)
    with tempfile.TemporaryDirectory(prefix="toka_accuracy_", dir=args.directory) as directory:
        use_cache_in(Path(directory) / "cache")
        os.environ |= TORCH_ENVIRONMENT["avx2"]  # torch is then slower than the kernels, which compute all gemms
        rows = measure_all(args, Path(directory), console)
    console.print("\nAll")
    print_rows(rows, console)
    return end_results(results | {"rows": rows}, check_rows(rows), args, console)


def use_cache_in(directory: Path) -> None:
    """What the engines convert goes to `directory`; kernels and what was measured of them stay where they are."""
    directory.mkdir()
    for name in ("demo", "kernels", "gemm", "hydragen", "tokenizers"):
        kept = cache_directory() / name
        kept.mkdir(parents=True, exist_ok=True)
        (directory / name).symlink_to(kept)
    os.environ["TOKA_CACHE"] = str(directory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
