"""What a server measures at its start, beside the plan of `toka plan` for the same model and flags."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.tiny_model import save_byte_tokenizer, save_tiny_model
from tests.model.by_transformers.helpers import tiny_classes
from tokasaurus.checkpoint import resolve_checkpoint, with_safetensors
from tokasaurus.cli import main
from tokasaurus.config import ServerConfig
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.entry import start_worker
from tokasaurus.model.worker.memory_plan import show_size

HUGE_PAGES = 2 * (2 << 20)
"""Addresses that the CPU kernels' KV cache reserves besides, so that it begins and ends at a huge page."""

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def planned_workers(directory: Path, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tokasaurus", "plan", f"model={directory}", *words, "--json"]
    workers: list[dict[str, Any]] = json.loads(subprocess.check_output(command))["workers"]
    return workers


def memory_lines(directory: Path, num_blocks: int, *words: str) -> list[str]:
    """One line of each worker."""
    flags = (f"model={directory}", *words, "device=cpu", "log_level=debug", f"kv_cache_num_tokens={num_blocks * 16}")
    with running_toka(*flags) as toka:
        assert toka.stop() == 0
    return [line for line in toka.lines if re.match(r" *model worker +memory ", line)]


def measured(line: str) -> tuple[str, float, int, int]:
    """A worker's line -> weights as planned; measured bytes of them; KV bytes of a token, planned and measured."""
    found = re.search(
        r"weights and rotary table (.+?) planned, ([\d.]+) (\w+) measured, "
        r"KV cache per token ([\d,]+) B planned, ([\d,]+) B measured$",
        line,
    )
    assert found is not None, line
    planned_kv, measured_kv = (int(text.replace(",", "")) for text in found.group(4, 5))
    return found[1], float(found[2]) * UNITS[found[3]], planned_kv, measured_kv


def take_freed_memory(num_bytes: int) -> list[torch.Tensor]:
    """Addresses are what is measured, and the allocator makes an allocation out of memory that other tests have freed,
    without new ones. This takes what has room for num_bytes, and then smaller parts, down to 1 MiB, since what is freed
    later may join them to larger ones; each until it has to ask the system. Keep the result."""
    taken: list[torch.Tensor] = []
    while num_bytes >= 1 << 20:
        before = psutil.Process().memory_info().vms
        taken.append(torch.empty(num_bytes, dtype=torch.uint8))  # its memory is not touched
        if psutil.Process().memory_info().vms > before:
            num_bytes //= 2
    return taken


def fixed_bytes(worker: dict[str, Any]) -> int:
    return sum(part["bytes"] for part in worker["parts"] if part["name"] in ("weights", "rotary table"))


@pytest.mark.parametrize("tp_size", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.long
def test_the_demo_models_weights_and_kv_cache_take_what_is_planned(tp_size: int) -> None:
    """Measured weights are the growth of the process's own memory: each matrix is padded to whole panels, and huge
    pages are counted whole. That and the allocator's rest are within 5 %."""
    directory = with_safetensors(resolve_checkpoint(None).directory)  # plain weights: the plan is one for CUDA
    words, num_blocks = ("dtype=float32", f"tp_size={tp_size}"), 128
    workers, lines = planned_workers(directory, *words), memory_lines(directory, num_blocks, *words)
    assert len(workers) == len(lines) == tp_size
    found = sorted(map(measured, lines))
    expected = sorted((show_size(fixed_bytes(worker)), fixed_bytes(worker)) for worker in workers)
    num_tokens = (num_blocks + 1) * 16  # with the padding block
    for (shown, num_bytes, planned_kv, measured_kv), (right, right_bytes) in zip(found, expected, strict=True):
        assert shown == right
        assert num_bytes == pytest.approx(right_bytes, rel=0.05)
        assert planned_kv == workers[0]["kv_bytes_per_token"]
        assert measured_kv == pytest.approx(planned_kv + HUGE_PAGES / num_tokens, abs=2)


def test_the_kv_cache_of_a_worker_in_this_process_takes_what_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 MiB of plain torch, in another dtype than the weights: two tensors. Memory of weights is measured in servers,
    by long tests: here, what other tests free is among it."""
    small_parts = [torch.empty(100_000, dtype=torch.uint8) for _ in range(1000)]
    del small_parts  # in any order of tests, some memory is free
    save_tiny_model(tmp_path, "qwen3")
    words = (f"model={tmp_path}", "dtype=float32", "kv_cache_dtype=float16", "attention_backend=torch")
    assert main(["plan", *words, "--json"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["workers"]
    small = ("device=cpu", "max_tokens_per_forward=64", "max_seqs_per_forward=8", "use_hydragen=F")
    num_tokens = (64 << 20) // planned["kv_bytes_per_token"] // 16 * 16
    config = ServerConfig.parse([*words, *small, f"kv_cache_num_tokens={num_tokens}"])
    phases: dict[str, str] = {}
    taken = take_freed_memory(32 << 20)
    start_worker(
        config, resolve_checkpoint(str(tmp_path)), Mesh(), 0, lambda done: phases.update({done.phase: done.detail})
    )
    assert phases["memory"].startswith(f"weights and rotary table {show_size(fixed_bytes(planned))} planned, ")
    found = re.search(r"KV cache per token ([\d,]+) B planned, ([\d,]+) B measured$", phases["memory"])
    assert found is not None, phases["memory"]
    planned_kv, measured_kv = map(int, found.groups())
    info = json.loads((tmp_path / "config.json").read_text())
    by_hand = info["num_hidden_layers"] * 2 * info["num_key_value_heads"] * info["head_dim"] * 2
    assert planned_kv == planned["kv_bytes_per_token"] == by_hand
    assert measured_kv == pytest.approx(by_hand, abs=1), "a few pages of 4 KiB in 64 MiB"
    del taken


@pytest.mark.long
def test_a_plain_torch_kv_cache_takes_what_is_planned(tmp_path: Path) -> None:
    """Of two ranks, each with one of two KV heads, in another dtype than the weights."""
    save_tiny_model(tmp_path, "qwen3")
    words, num_blocks = ("dtype=float32", "kv_cache_dtype=float16", "tp_size=2", "attention_backend=torch"), 4096
    config = json.loads((tmp_path / "config.json").read_text())
    by_hand = config["num_hidden_layers"] * 2 * 1 * config["head_dim"] * 2
    lines = memory_lines(tmp_path, num_blocks, *words)
    assert {worker["kv_bytes_per_token"] for worker in planned_workers(tmp_path, *words)} == {by_hand}
    for line in lines:
        _, _, planned_kv, measured_kv = measured(line)
        assert planned_kv == by_hand
        assert measured_kv == pytest.approx(by_hand, abs=1), "a few pages of 4 KiB in 25 MB"
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("family", "is_tied", "flags"),
    [
        ("mixtral", False, ()),
        ("mixtral", True, ("dtype=float32",)),
        ("gemma2", True, ()),
        ("gemma2", True, ("dtype=float16",)),
        ("gemma2", True, ("quantization=int8",)),
    ],
)
@pytest.mark.long
def test_weights_of_a_class_take_what_is_planned(
    family: str, is_tied: bool, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Experts and embeddings become float32 where activations are that, and a tied LM head is packed beside them."""
    config = tiny_classes.tiny_config(family)
    config.vocab_size, config.hidden_size, config.tie_word_embeddings = 40_000, 1024, is_tied
    tiny_classes.save_tiny_model(tmp_path, config).to(torch.bfloat16).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    small = ("max_tokens_per_forward=64", "max_seqs_per_forward=8", "model_impl=transformers")
    (line,) = memory_lines(tmp_path, 64, *small, *flags)
    shown, num_bytes, _, _ = measured(line)
    number, unit = shown.split()
    planned = float(number) * UNITS[unit]
    assert planned > 64 << 20
    assert num_bytes == pytest.approx(planned, rel=0.05)
