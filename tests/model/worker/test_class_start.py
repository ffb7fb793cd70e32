"""What the start of a model of transformers' class says of its weights: which stay plain; what it does besides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.fx import GraphModule

from tests.helpers.tiny_model import save_byte_tokenizer
from tests.model.by_transformers.helpers.tiny_classes import save_tiny_model, tiny_config
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import FlagRefused, PhaseDone
from tokasaurus.model.cpu.experts import PackedExperts
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import entry
from tokasaurus.model.worker.entry import load_worker
from tokasaurus.model.worker.self_check import Checks
from tokasaurus.model.worker.start import PhaseLog

Graph = Callable[..., Any]


def weights_line(directory: Path, *flags: str) -> str:
    reports: list[PhaseDone] = []
    config = ServerConfig.parse(["device=cpu", "dtype=float32", "kv_cache_num_tokens=1024", *flags])
    load_worker(config, resolve_checkpoint(str(directory)), Mesh(), 0, PhaseLog(reports.append))
    return next(report.detail for report in reports if report.phase == "weights")


def test_experts_take_their_memory_before_the_kv_cache_is_sized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, calls = tiny_config("mixtral"), list[object]()
    save_tiny_model(tmp_path, config)
    save_byte_tokenizer(tmp_path)
    monkeypatch.setattr(PackedExperts, "reserve", lambda _, *sizes: calls.append(sizes))
    own = entry.size_kv_cache
    monkeypatch.setattr(entry, "size_kv_cache", lambda *args, **options: calls.append("size") or own(*args, **options))
    flags = ServerConfig.parse(["device=cpu", "dtype=float32", "max_tokens_per_forward=64", "kv_cache_num_tokens=1024"])
    checkpoint = resolve_checkpoint(str(tmp_path), impl="transformers")
    entry.start_worker(flags, checkpoint, Mesh(), 0, lambda _: None)
    assert calls == [*[(64, config.num_experts_per_tok)] * config.num_hidden_layers, "size"]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_bytes_that_are_not_quantised_are_told(quantization: str, tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, tiny_config("flex_olmo"))
    save_byte_tokenizer(tmp_path)
    num_bytes = sum(
        4 * each.numel() for name, each in oracle.named_parameters() if ".experts." in name or ".gate." in name
    )
    assert num_bytes > 4 * 4 * 4 * 3 * 64 * 96
    line = weights_line(tmp_path, f"quantization={quantization}", "quantized_compute=exact")
    assert line.endswith(f", {num_bytes / 2**20:.4g} MiB of experts and other matrices stay float32")
    assert "experts" not in weights_line(tmp_path)


def test_a_class_without_linear_layers_is_not_quantised(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config("gpt2"))
    save_byte_tokenizer(tmp_path)
    with pytest.raises(FlagRefused, match=r"^quantization=int8: gpt2 has no linear layers but its LM head$"):
        weights_line(tmp_path, "quantization=int8")


def test_experts_of_the_class_are_not_counted(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config("flex_olmo"))
    save_byte_tokenizer(tmp_path)
    with pytest.raises(FlagRefused, match=r"^expert_counts=T: layers that transformers computes do not tell which"):
        weights_line(tmp_path, "expert_counts=T")


def test_compiled_layers_are_checked(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config("mixtral"))
    save_byte_tokenizer(tmp_path)
    config = ServerConfig.parse(["device=cpu", "dtype=float32", "kv_cache_num_tokens=1024", "torch_compile=T"])
    places = resolve_checkpoint(str(tmp_path), impl="transformers"), Mesh(), 0, PhaseLog(lambda _: None)
    for is_right in (True, False):

        def compile_graph(
            self: Compiler, graph: GraphModule, *_: object, is_right: bool = is_right, **__: object
        ) -> Graph:
            self.num_compilations += 1
            return graph.forward if is_right else lambda *inputs: [2 * output for output in graph.forward(*inputs)]

        torch._dynamo.reset()
        checks = Checks(is_thorough=True)
        with patch.object(Compiler, "_compile_graph", compile_graph):
            if is_right:
                start = load_worker(config, *places, checks=checks)
                assert start.compiler is not None
                assert (start.compiler.num_compilations, start.compiler.has_failed) == (1, False)
            else:
                with pytest.raises(FlagRefused, match=r"^torch_compile=T: layers \(prefill\): worst row differs by"):
                    load_worker(config, *places, checks=checks)
        assert any(result.feature == "transformers" for result in checks.results) is is_right
