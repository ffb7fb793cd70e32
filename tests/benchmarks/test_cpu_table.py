"""The table of servers for CPUs: its models, its loads and bounds, and a whole run with this server."""

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFReader

from benchmarks.cpu_table import __main__ as cpu_table
from benchmarks.cpu_table.__main__ import Measured, ratios_to_toka, requests_file
from benchmarks.cpu_table.bounds import Load, Machine, loads_of
from benchmarks.cpu_table.models import FORMATS, SHAPES, WeightBytes, num_matrix_weights, write_gguf
from benchmarks.random_models import TINY, ModelShape
from tokasaurus.checkpoint import resolve_checkpoint

SMALL = ModelShape("small", 512, 256, 512, 9, 4, 2, 64, is_tied=False)


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_have_the_same_spread_in_each_format(kind: str, tmp_path: Path) -> None:
    num_bytes = write_gguf(tmp_path / "model.gguf", SMALL, kind).of_all_tokens
    matrices = [tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors if len(tensor.shape) == 2]
    for tensor in matrices:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.std(values) == pytest.approx(0.02, rel=0.1), tensor.name
        assert abs(np.mean(values)) < 0.002, tensor.name
    multiplied = [tensor for tensor in matrices if tensor.name != "token_embd.weight"]
    assert num_bytes == sum(tensor.n_bytes for tensor in multiplied)
    assert num_matrix_weights(SMALL) == sum(tensor.n_elements for tensor in multiplied)


def test_more_bits_go_where_llama_cpp_puts_them(tmp_path: Path) -> None:
    """Of eight layers, by its rule, the first, the last, and each third between them."""
    write_gguf(tmp_path / "model.gguf", replace(SMALL, num_layers=8), "Q4_K_M")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    assert types["output.weight"] == "Q6_K"
    assert types["token_embd.weight"] == "Q4_K"
    for name in ("attn_v", "ffn_down"):
        assert [layer for layer in range(8) if types[f"blk.{layer}.{name}.weight"] == "Q6_K"] == [0, 3, 6, 7]
    write_gguf(tmp_path / "narrow.gguf", TINY, "Q4_K_M")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "narrow.gguf").tensors}
    assert {types["blk.0.attn_q.weight"], types["blk.1.ffn_down.weight"]} == {"Q5_0", "Q8_0"}


def test_a_file_is_a_model_of_its_shape(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", SMALL, "Q8_0")
    info = resolve_checkpoint(str(tmp_path / "model.gguf")).info
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (9, 256, 512)


def test_a_file_with_experts_is_a_model_with_experts(tmp_path: Path) -> None:
    shape = replace(SMALL, num_experts=8, num_chosen=2)
    stored = write_gguf(tmp_path / "model.gguf", shape, "Q4_K_M")
    tensors = GGUFReader(tmp_path / "model.gguf").tensors
    experts = [tensor for tensor in tensors if "_exps" in tensor.name]
    assert stored.of_experts == sum(tensor.n_bytes for tensor in experts)
    assert len(experts) == 3 * shape.num_layers
    dense = [tensor for tensor in tensors if len(tensor.shape) == 2 and tensor.name != "token_embd.weight"]
    of_token = sum(tensor.n_elements for tensor in dense) + sum(tensor.n_elements for tensor in experts) // 4
    assert num_matrix_weights(shape) == of_token
    info = resolve_checkpoint(str(tmp_path / "model.gguf")).info
    assert {(layer.mlp.expert.width, layer.mlp.router.num_chosen) for layer in info.spec.layers} == {(512, 2)}
    assert stored.read_by(shape, 1) == pytest.approx(stored.of_all_tokens + stored.of_experts / 4)
    assert stored.read_by(shape, 1000) == pytest.approx(stored.of_all_tokens + stored.of_experts)


def test_the_bound_of_one_stream_is_reading_and_of_many_samples_computing() -> None:
    shape, machine = SHAPES["1B"], Machine(bytes_per_s=20e9, operations_per_s=400e9)
    weights = num_matrix_weights(shape)
    stream = Load("one", 1, 1, 101).least_seconds(machine, shape, WeightBytes(2 * weights))
    assert stream == pytest.approx(101 * 2 * weights / 20e9, rel=0.01)
    layers = weights - 128_256 * 2048  # the head is for the last token of a prompt alone
    samples = Load("many", 512, 100, 11, has_one_prompt=True).least_seconds(machine, shape, WeightBytes(2 * weights))
    assert samples == pytest.approx((100 * layers + 10 * 512 * weights) * 2 / 400e9, rel=0.01)
    unrelated = Load("many", 512, 100, 11).least_seconds(machine, shape, WeightBytes(2 * weights))
    assert unrelated == pytest.approx((512 * 100 * layers + 11 * 512 * weights) * 2 / 400e9, rel=0.02)


def test_requests_of_a_load(tmp_path: Path) -> None:
    _, unrelated, samples = loads_of(SHAPES["4B"])
    for load, num_prompts in ((unrelated, 64), (samples, 1)):
        requests_file(tmp_path / "requests", load, seed=1)
        lines = [json.loads(line) for line in (tmp_path / "requests").read_text().splitlines()]
        assert len(lines) == load.num_requests
        assert len({tuple(line["prompt"]) for line in lines}) == num_prompts
        assert {(len(line["prompt"]), line["max_tokens"]) for line in lines} == {
            (load.prompt_tokens, load.output_tokens)
        }


def test_ratios_are_within_rounds() -> None:
    def row(server: str, number: int, speed: float) -> Measured:
        return Measured("1B", "Q8_0", "one stream", server, number, speed, 0.5, "")

    rows = [row("toka", 0, 30), row("llama.cpp", 0, 10), row("llama.cpp", 1, 50), row("toka", 2, 8), row("vllm", 2, 2)]
    assert ratios_to_toka(rows, ("1B", "Q8_0", "one stream", "llama.cpp")) == [3.0]
    assert ratios_to_toka(rows, ("1B", "Q8_0", "one stream", "vllm")) == [4.0]


def test_a_missing_server_is_told_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu_table.main(["--llama-server", "/nowhere/llama-server"]) == 2
    assert "neither a program nor an environment" in capsys.readouterr().out


@pytest.mark.long
def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu_table.SHAPES, "135M", SMALL)
    words = ["--shapes", "135M", "--formats", "bfloat16", "Q4_K_M", "--json", str(tmp_path / "found.json")]
    assert cpu_table.main([*words, "--picture", str(tmp_path / "picture.svg"), "--directory", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["kind"], row["load"]) for row in rows] == [
        (kind, load.name) for kind in ("bfloat16", "Q4_K_M") for load in loads_of(SMALL)
    ]
    assert all(row["tokens_per_s"] > 0 and row["share_of_bound"] > 0 for row in rows)
    assert "bfloat16" in (tmp_path / "picture.svg").read_text()
    again = ["--shapes", "--add", str(tmp_path / "found.json"), "--picture", str(tmp_path / "again.svg")]
    assert cpu_table.main(again) == 0
    assert (tmp_path / "again.svg").read_text() == (tmp_path / "picture.svg").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"found.json", "picture.svg", "again.svg"}
