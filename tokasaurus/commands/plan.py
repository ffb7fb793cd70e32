"""Runs `toka plan`: reads a checkpoint's configuration and headers, and prints the plan."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tokasaurus.checkpoint import CheckpointError, ModelInfo, fit_to_tensors, read_model_info, weight_files
from tokasaurus.checkpoint.dequantized import is_plain
from tokasaurus.checkpoint.info import ADAPTER_CONFIG, read_config
from tokasaurus.checkpoint.json_files import Fields
from tokasaurus.checkpoint.quantized.config import SETTINGS_FILES
from tokasaurus.checkpoint.resolve import download_files, gguf_directory, gguf_file, is_repo_id, named_path
from tokasaurus.checkpoint.weight_files import has_weights, read_tensors
from tokasaurus.config import ServerConfig
from tokasaurus.flags import SUFFIXES, FlagError, flag
from tokasaurus.model.worker.memory_plan import (
    WEIGHTS,
    DoesNotFit,
    MemoryPlan,
    Part,
    Sizes,
    plan_memory,
    show_size,
    sizes_of,
)

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, **SUFFIXES}
_OF_SERVER = (
    *(
        "dtype",
        "rope_scaling",
        "model_impl",
        "kv_cache_dtype",
        "tp_size",
        "ep",
        "pp_size",
        "symmetric_all_reduce",
        "page_size",
    ),
    *("max_tokens_per_forward", "max_seqs_per_forward", "max_num_tokens_per_request"),
    *("attention_backend", "use_cudagraphs"),
)


class PlanConfig(ServerConfig, only=_OF_SERVER, heading="flags of the server"):
    """The flags of `toka plan`, checked by `finalize`."""

    model: str | None = flag(
        None,
        "directory in Hugging Face format, or a .gguf file, of which config and the tensors' headers are read; for an "
        "estimate, a directory without weights, a config.json, or a Hugging Face repo id, of which that alone is read",
        none_means="required",
        heading="plan",
    )
    device_memory: str = flag("80GiB", "free memory of each CUDA device before the start, such as 80GiB, 24GB or 24G")
    json: bool = flag(False, "print JSON")

    dtype: str = ServerConfig.declared(
        "dtype", default="bfloat16", meaning="data type of the weights and of computation"
    )

    def further_errors(self) -> Iterator[str]:
        try:
            parse_size(self.device_memory)
        except FlagError as error:
            yield from error.lines
        if self.model is None:
            yield "model is missing: toka plan model=NAME [device_memory=80GiB] [name=value ...]"
        if self.attention_backend not in (None, "flashinfer", "torch"):
            yield f"attention_backend={self.attention_backend}: a CUDA device has flashinfer and torch"


def parse_size(text: str) -> int:
    """Bytes of a size such as "80GiB", "24GB" or "1.5 GiB". Raises FlagError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise FlagError(
            f"device_memory={text}: must be a number and a unit, such as 80GiB; units are {', '.join(_UNITS)}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


SHOWN_LENGTHS = (1024, 4096, 32_768)
"""Tokens of the sequences whose number is shown."""


def plan(config: PlanConfig, _words: list[str]) -> int:
    """Print the plan; returns the exit code: 2 if the model does not fit. Raises CheckpointError."""
    assert config.model is not None, "checked by finalize"
    try:
        info, is_estimate = read_info(config.model, config.rope_scaling, config.model_impl)
        result = plan_memory(info, planned_sizes(config, info))
        is_dequantised = is_quantised(config.model, info)
    except (DoesNotFit, ValueError) as error:
        print(f"toka plan: {error}", file=sys.stderr)
        return 2
    if config.json:
        print(json.dumps(as_json(result, is_estimate, is_dequantised), indent=2))
    else:
        _print_plan(config.model, result, is_estimate)
        if is_dequantised:
            print(f"the weights are quantised in the files; on CUDA they are dequantised to {config.dtype}, as counted")
        if config.kv_cache_dtype == "int8":
            print("an int8 KV cache is for CPUs only: on CUDA the server refuses it")
    return 0


def read_info(model: str, rope_scaling: Fields | None = None, impl: str = "auto") -> tuple[ModelInfo, bool]:
    """The model's configuration, and whether config.json alone says so: otherwise it is compared with the headers of
    the weights, which decide whether the LM head is counted. Raises CheckpointError and FlagRefused."""
    path = _local(model)
    if path.is_file():
        if path.suffix != ".json":
            raise CheckpointError(
                f"{model}: toka plan reads a directory in Hugging Face format, a .gguf file or a config.json"
            )
        return read_config(path, rope_scaling=rope_scaling, impl=impl), True
    if not path.is_dir():
        if not is_repo_id(model):
            raise CheckpointError(
                f"{model!r} is neither a directory nor a .gguf file nor a config.json nor a Hugging Face repository id"
            )
        names = ["config.json", "generation_config.json", ADAPTER_CONFIG, *SETTINGS_FILES]
        return read_model_info(download_files(model, names), rope_scaling, impl), True
    info = read_model_info(path, rope_scaling, impl)
    if not has_weights(path):
        return info, True
    return fit_to_tensors(info, weight_files(path)), False


def _local(model: str) -> Path:
    """The directory or file that a model's name is, if it is none of a repository."""
    path = named_path("model", model, _show_phase)
    file = None if path.is_dir() else gguf_file(path)
    return path if file is None else gguf_directory(file)


def _show_phase(line: str) -> None:
    print(f"toka plan: {line}", file=sys.stderr)


def planned_sizes(config: PlanConfig, info: ModelInfo) -> Sizes:
    return sizes_of(config, info, parse_size(config.device_memory), config.dtype, config.kv_cache_dtype or config.dtype)


def is_quantised(model: str, info: ModelInfo) -> bool:
    """Whether the files' weights are quantised: by their tensors, or where there are none, by config.json. Arguments
    and errors as of `read_info`, which has read the model."""
    path = _local(model)
    if path.is_dir() and has_weights(path):
        tensors = read_tensors(weight_files(path), info.quantization)
        return not all(map(is_plain, tensors.values()))
    return info.quantization is not None


def as_json(result: MemoryPlan, is_estimate: bool, is_dequantised: bool) -> dict[str, Any]:
    """All sizes in bytes. is_estimate: see read_info. is_dequantised: see is_quantised; on CUDA weights are plain."""
    workers = [
        {
            "pp_rank": worker.pp_rank,
            "tp_rank": worker.tp_rank,
            "parts": [
                {
                    "name": part.name,
                    "bytes": part.num_bytes,
                    "reason": part.reason,
                    "exact": _is_exact(part, is_estimate),
                }
                for part in worker.parts
            ],
            "kv_bytes_per_token": worker.kv_bytes_per_token,
            "kv_blocks": worker.num_kv_blocks,
        }
        for worker in result.workers
    ]
    return {
        "estimated_from_config": is_estimate,
        "dequantised": is_dequantised,
        "device_memory": result.sizes.device_bytes,
        "tp_size": result.sizes.tp_size,
        "pp_size": result.sizes.pp_size,
        "workers": workers,
        "page_size": result.sizes.page_size,
        "kv_blocks": result.least.num_kv_blocks,
        "kv_tokens": result.num_kv_tokens,
        "max_tokens_per_sequence": min(result.sizes.context_length, result.num_kv_tokens),
        "sequences_at_once": {str(length): result.num_sequences(length) for length in SHOWN_LENGTHS},
    }


def _is_exact(part: Part, is_estimate: bool) -> bool:
    return part.is_exact and not (is_estimate and part.name == WEIGHTS)


def _print_plan(model: str, result: MemoryPlan, is_estimate: bool) -> None:
    sizes, least = result.sizes, result.least
    console = Console()
    title = f"{model} on {len(result.workers)} x {show_size(sizes.device_bytes)}"
    if len(result.workers) > 1:
        title += f": stage {least.pp_rank}, rank {least.tp_rank}, which has the fewest KV blocks"
    table = Table(title=title, title_justify="left")
    table.add_column("memory of the worker")
    table.add_column("size", justify="right")
    table.add_column("reason")
    for part in least.parts:
        estimate = "" if _is_exact(part, is_estimate) else "; an estimate"
        table.add_row(part.name, show_size(part.num_bytes), part.reason + estimate)
    kv_bytes = (least.num_kv_blocks + 1) * least.kv_bytes_per_token * sizes.page_size
    blocks = f"{least.num_kv_blocks:,} blocks of {sizes.page_size} tokens"
    reason = f"{blocks} x {least.kv_bytes_per_token:,} B, and one for padding"
    table.add_row("KV cache", show_size(kv_bytes), reason)
    spare = sizes.device_bytes - least.num_fixed_bytes - kv_bytes
    table.add_row(
        "kept free", show_size(spare), "5 % of what the other parts leave: fragmentation, token ids of the KV cache"
    )
    console.print(table)
    if len(result.workers) > 1:
        for worker in result.workers:
            console.print(
                f"stage {worker.pp_rank}, rank {worker.tp_rank}: {show_size(worker.parts[0].num_bytes)} of weights, "
                f"room for {worker.num_kv_blocks:,} blocks",
                highlight=False,
            )
    at_once = ", ".join(f"{result.num_sequences(length):,} of {length:,}" for length in SHOWN_LENGTHS)
    longest = min(sizes.context_length, result.num_kv_tokens)
    console.print(
        f"KV cache for {result.num_kv_tokens:,} tokens: sequences at once, if they share nothing: {at_once} tokens; "
        f"one sequence has at most {longest:,}",
        highlight=False,
    )
    if is_estimate:
        console.print(
            "estimated from config.json alone: the tensors, which decide whether the LM head is one with the "
            "embedding, were not looked at",
            highlight=False,
        )
