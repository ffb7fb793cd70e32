"""Damaged and hostile model files: each is loaded, or refused in one line, in little time and memory.

`python -m torture.fuzz.fuzz_checkpoints [NUM_CASES]` runs the cases in child processes and ends with 1 if any of
them ended in a traceback, took too long or needed too much memory. The same number always gives the same cases.
"""

import faulthandler
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from gguf import GGMLQuantizationType
from safetensors.numpy import save_file
from safetensors.torch import save

from tests.checkpoint.helpers.gguf_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    VOCAB,
    byte_tokenizer,
    random_weights,
    write_gguf,
)
from tests.checkpoint.helpers.quantised_weights import Format, quantise
from tokasaurus.checkpoint import check_weight_sizes, fit_to_tensors, read_model_info, weight_files
from tokasaurus.checkpoint.gguf.conversion import write_hf_directory
from tokasaurus.messages.status import UserError
from tokasaurus.model.decoder.decoder import build_decoder
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.text.tokenizer import Tokenizer
from torture.fuzz.json_mutations import encode, mutate
from torture.fuzz.reports import Report, run_from_command_line

CASE_LIMIT_S = 20
"""Cases take milliseconds; the machine may be busy."""
MEMORY_BYTES = 2 << 30
"""Address space that a case may use on top of the process's own."""
MAX_LINE_CHARS = 1400
_CHUNK = 25
_KINDS = (
    *("gguf bytes", "gguf metadata", "safetensors bytes", "safetensors header", "config.json", "index", "tokenizer"),
    *("quantised bytes", "quantised header", "quantization_config"),
)
_FORMATS = (
    Format("awq"),
    Format("gptq", has_order=True),
    Format("gptq", num_bits=8, group_size=None, is_symmetric=True),
    Format("int-quantized", num_bits=8, group_size=None, is_symmetric=True, quantizes_activations=True),
    Format("pack-quantized"),
)
_FAMILIES = ("llama", "qwen2", "qwen3")
_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "float32",
    "eos_token_id": [0],
    "layer_types": ["full_attention"] * LAYERS,
    "quantization_config": None,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


class _Hang(BaseException):
    """A case exceeded CASE_LIMIT_S; no handler for ordinary errors catches it."""


class _Bases:
    """Valid files, which each case changes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        kinds = (GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16)
        self.ggufs: list[bytes] = []
        for family, kind in zip(_FAMILIES, kinds, strict=True):
            path = directory / "base.gguf"
            write_gguf(path, family, random_weights(family, tied=True), kind)
            self.ggufs.append(path.read_bytes())
        save_file(random_weights("llama", tied=True), directory / "base.safetensors")
        self.safetensors = (directory / "base.safetensors").read_bytes()
        self.quantised = [(how.config, self._quantised(how)) for how in _FORMATS]
        write_hf_directory([directory / "base.gguf"], self._made("hf"))
        self.tokenizer = json.loads((directory / "hf" / "tokenizer.json").read_bytes())

    def _quantised(self, how: Format) -> bytes:
        tensors: dict[str, torch.Tensor] = {}
        for name, array in random_weights("llama", tied=True).items():
            if name.endswith("proj.weight"):
                stored, _ = quantise(torch.from_numpy(array), how)
                tensors |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in stored.items()}
            else:
                tensors[name] = torch.from_numpy(array)
        return save(tensors)

    def _made(self, name: str) -> Path:
        path = self.directory / name
        path.mkdir()
        return path


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """Changes a few bytes, most of them near the start, where formats keep counts and lengths; or cuts the file."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        near = rng.choice([64, 400, 3000, len(changed)])
        position = rng.randrange(max(1, min(near, len(changed))))
        kind = rng.random()
        if kind < 0.3:
            changed[position : position + 1] = rng.randbytes(1)
        elif kind < 0.6:
            number = rng.choice([0, 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1, rng.getrandbits(64)])
            changed[position : position + 8] = number.to_bytes(8, "little")
        elif kind < 0.7:
            changed[position : position + 4] = rng.randrange(16).to_bytes(4, "little")
        elif kind < 0.8:
            changed[position:position] = rng.randbytes(rng.randint(1, 16))
        elif kind < 0.9:
            del changed[position : position + rng.randint(1, 16)]
        else:
            del changed[position:]
        if not changed:
            break
    return bytes(changed)


def _run_case(kind: str, rng: random.Random, bases: _Bases, directory: Path) -> None:
    """Raises UserError if the files are refused."""
    if kind.startswith("gguf"):
        path = directory / "model.gguf"
        if kind == "gguf bytes":
            path.write_bytes(damage_bytes(rng.choice(bases.ggufs), rng))
        else:
            _write_strange_gguf(path, rng)
        converted = directory / "converted"
        converted.mkdir()
        write_hf_directory([path], converted)
        _load(converted)
        return
    config, weights, tokenizer = json.dumps(_CONFIG).encode(), bases.safetensors, json.dumps(bases.tokenizer).encode()
    name, may_keep_blocks = "model.safetensors", False
    if kind.startswith("quanti"):
        quantization, weights = rng.choice(bases.quantised)
        may_keep_blocks = rng.random() < 0.5
        config = json.dumps({**_CONFIG, "quantization_config": quantization}).encode()
    match kind:
        case "safetensors bytes" | "quantised bytes":
            weights = damage_bytes(weights, rng)
        case "safetensors header" | "quantised header":
            length = int.from_bytes(weights[:8], "little")
            header = encode(mutate(json.loads(weights[8 : 8 + length]), rng), rng)
            weights = len(header).to_bytes(8, "little") + header + weights[8 + length :]
        case "config.json":
            config = encode(mutate(_CONFIG, rng), rng)
        case "quantization_config":
            config = json.dumps(_CONFIG | {"quantization_config": None}).encode()
            changed = encode(mutate(quantization, rng), rng)
            config = config.replace(b'"quantization_config": null', b'"quantization_config": ' + changed)
        case "index":
            name = "model-1.safetensors"
            index = {"weight_map": {"model.norm.weight": name, "model.embed_tokens.weight": name}, "metadata": {}}
            (directory / "model.safetensors.index.json").write_bytes(encode(mutate(index, rng), rng))
        case "tokenizer":
            tokenizer = encode(mutate(bases.tokenizer, rng), rng)
    for file, content in (("config.json", config), (name, weights), ("tokenizer.json", tokenizer)):
        (directory / file).write_bytes(content)
    _load(directory, may_keep_blocks)


def _write_strange_gguf(path: Path, rng: random.Random) -> None:
    """A file that is well formed, whose metadata have wrong values, types or are missing."""
    family = rng.choice(_FAMILIES)
    keys = ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"]
    keys += ["attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon", "rope.freq_base"]
    names = [*(f"{family}.{key}" for key in keys), *byte_tokenizer(), "split.count", "tokenizer.chat_template"]
    names += ["tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token", "general.alignment"]
    fields: dict[str, Any] = {}
    for name in rng.sample(names, rng.randint(1, 3)):
        value = rng.choice(
            [0, 1, 3, 7, 2**31, None, True, 1e30, float("nan"), "x", "", [1], ["a"], [1.5, 2.0], ["a b"]]
        )
        fields[name] = byte_tokenizer()[name] * 2 if value == 1 and name in byte_tokenizer() else value
        if isinstance(fields[name], int) and not isinstance(fields[name], bool):
            fields[name] = fields[name] % 2**32
    weights = random_weights(family, tied=rng.random() < 0.5)
    if rng.random() < 0.3:
        name = rng.choice([name for name in sorted(weights) if not name.endswith(("q_proj.weight", "k_proj.weight"))])
        weights[name] = weights[name].reshape(-1)[: rng.choice([32, 64])]
    write_gguf(path, family, weights, GGMLQuantizationType.F32, fields)


def _load(directory: Path, may_keep_blocks: bool = False) -> None:
    """As a start does: the launcher, the server and the worker."""
    files = weight_files(directory)
    info = fit_to_tensors(read_model_info(directory), files)
    Tokenizer.load(directory)
    check_weight_sizes(files, info)
    try:
        model = build_decoder(info, Mesh(), torch.float32)
    except ValueError as error:  # which the worker reports as a UserError
        raise UserError(str(error)) from error
    model.materialize(torch.device("cpu"), min(info.context_length, 512))
    shards, quantization = model.weight_shards(), info.quantization
    load_weights(files, shards, model.ignores, may_keep_blocks=may_keep_blocks, quantization=quantization)


def _outcome(kind: str, seed: int, bases: _Bases) -> tuple[str, str]:
    """kind and outcome: "loaded", "refused", or what was wrong."""
    directory = Path(tempfile.mkdtemp(dir=bases.directory))
    try:
        with _time_limit():
            _run_case(kind, random.Random(f"{kind} {seed}"), bases, directory)
        return kind, "loaded"
    except UserError as error:
        line = str(error)
        if not line.isprintable() or len(line) > MAX_LINE_CHARS:
            return kind, f"seed {seed}: the message is not one short line: {line!r}"
        return kind, "refused"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also _Hang, and panics of libraries in Rust
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        return kind, f"seed {seed}: {type(error).__name__}: {error} ({where})"
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _Hang(f"longer than {CASE_LIMIT_S} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, CASE_LIMIT_S)
    # For a hang in native code, where no Python handler runs.
    faulthandler.dump_traceback_later(2 * CASE_LIMIT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _run_chunk(seeds: range) -> list[tuple[str, str]]:
    """In a child process."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as directory:
        bases = _Bases(Path(directory))
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY_BYTES, -1))
        return [_outcome(_KINDS[seed % len(_KINDS)], seed, bases) for seed in seeds]


def run(num_cases: int) -> Report:
    report = Report("fuzzed checkpoints")
    chunks = [range(start, min(start + _CHUNK, num_cases)) for start in range(0, num_cases, _CHUNK)]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [(chunk, pool.submit(_run_chunk, chunk)) for chunk in chunks]
        for chunk, future in futures:
            try:
                for kind, outcome in future.result():
                    if outcome in ("loaded", "refused"):
                        report.add(kind, outcome)
                    else:
                        report.add_fault(kind, outcome)
            except BrokenProcessPool:
                report.add_fault("all", f"a child process died in one of the cases from {chunk.start} on")
                break
    return report


if __name__ == "__main__":
    sys.exit(run_from_command_line(run))
