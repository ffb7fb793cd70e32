"""New weights in place: the model equals one that was loaded with them, in every layout of its weights; refused files
change nothing."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tests.checkpoint.helpers.quantised_models import save_quantised_model
from tests.checkpoint.helpers.quantised_weights import Format
from tests.helpers.examples import few
from tests.helpers.tiny_model import FAMILIES, VOCAB_SIZE, save_random_model, save_tiny_model
from tests.model.helpers.greedy_decoding import load, run_whole_prompt
from tests.model.helpers.pretend_device import HostTransfers
from tokasaurus.checkpoint import ModelInfo, file_states, resolve_checkpoint, update_files
from tokasaurus.messages.commands import UpdateWeights
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.cpu.gemm_choice import MANY_ROWS, GemmChoice
from tokasaurus.model.decoder import uploads
from tokasaurus.model.decoder.decoder import Decoder, build_decoder
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.weight_update import WeightUpdates

CPU = torch.device("cpu")
LAYOUTS: dict[str, GemmChoice | None] = {
    "plain": None,
    "kernels": GemmChoice(1.0, 1.0),
    "torch": GemmChoice(0.5, 0.5),
    "kernels for few rows, torch for many": GemmChoice(1.0, 0.5),
}
NAME = "model.safetensors"


def load_packed(directory: Path, layout: str) -> tuple[Decoder, ModelInfo]:
    model, info = load(directory)
    choice = LAYOUTS[layout]
    if choice is not None:
        model.pack(load_kernels(), choice)
    return model, info


def logits_of(model: Decoder, info: ModelInfo) -> list[Tensor]:
    """For few rows and for many."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(VOCAB_SIZE, (num_rows,), generator=generator) for num_rows in (3, MANY_ROWS + 5)]
    return [run_whole_prompt(model, info, Mesh(), None, prompt).clone() for prompt in prompts]


def apply(model: Decoder, info: ModelInfo, directory: Path, is_partial: bool = False) -> str:
    updates = WeightUpdates(model, info, directory, Mesh(), CPU)
    return updates.apply(UpdateWeights(0, str(directory), "1", is_partial))


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
@few(1, "family", FAMILIES)
def test_an_updated_model_computes_what_a_loaded_one_does(family: str, tied: bool, layout: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save_tiny_model(old, family, tied, seed=0)
    save_tiny_model(new, family, tied, max_shard_size="60KB", seed=1)
    model, info = load_packed(old, layout)
    logits_of(model, info)  # caches of the first forwards
    assert apply(model, info, new) == ""
    assert_equal(logits_of(model, info), logits_of(*load_packed(new, layout)))
    assert apply(model, info, old) == ""
    assert_equal(logits_of(model, info), logits_of(*load_packed(old, layout)))


def test_on_cuda_new_weights_go_through_the_pinned_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save_tiny_model(old, "llama", seed=0)
    save_tiny_model(new, "llama", seed=1)
    model, info = load(old)
    transfers = HostTransfers()
    monkeypatch.setattr(uploads, "CudaTransfers", lambda _device: transfers)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    updates = WeightUpdates(model, info, new, Mesh(), torch.device("cuda", 0))
    assert updates.apply(UpdateWeights(0, str(new), "1")) == ""
    assert len(transfers.uploads) == len(load_file(new / NAME))
    assert_equal(logits_of(model, info), logits_of(*load(new)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_of_the_weights_replaces_only_that_part(layout: str, tmp_path: Path) -> None:
    """Parts of fused layers and of packed panels included."""
    old, part, whole = tmp_path / "old", tmp_path / "part", tmp_path / "whole"
    save_tiny_model(old, "qwen2", seed=0)
    save_tiny_model(whole, "qwen2", seed=1)
    chosen = ("0.self_attn.k_proj.", "1.mlp.up_proj.", "2.self_attn.o_proj.", "1.input_layernorm", "embed_tokens")
    new = load_file(whole / NAME)
    names = [name for name in new if any(words in name for words in chosen)]
    assert len(names) == 6, "one is a bias"
    part.mkdir()
    save_file({name: new[name] for name in names}, part / "some.safetensors")
    save_file(load_file(old / NAME) | {name: new[name] for name in names}, whole / NAME)
    model, info = load_packed(old, layout)
    assert apply(model, info, part) == "tensor lm_head.weight is missing and 32 more"
    assert_equal(logits_of(model, info), logits_of(*load_packed(old, layout)))
    assert apply(model, info, part, is_partial=True) == ""
    assert_equal(logits_of(model, info), logits_of(*load_packed(whole, layout)))


def test_files_that_have_changed_since_are_not_read(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save_tiny_model(old, "llama", seed=0)
    save_tiny_model(new, "llama", seed=1)
    model, info = load_packed(old, "kernels")
    updates = WeightUpdates(model, info, old, Mesh(), CPU)
    update = UpdateWeights(0, str(new), "1", files=file_states(update_files(new)))
    assert updates.apply(update) == ""
    assert updates.apply_again() == ""
    save_tiny_model(new, "llama", seed=2)
    assert updates.apply_again() == f"files in {new} have changed since the update was asked for"


@pytest.mark.parametrize(
    "how", [Format("awq"), Format("int-quantized", num_bits=8, group_size=None)], ids=lambda how: how.name
)
def test_quantised_weights_are_read_as_their_own_config_says(how: Format, tmp_path: Path) -> None:
    """Into a plain model, and plain weights into one that was loaded from quantised ones."""
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    save_quantised_model(quantised, "llama", how)
    config = AutoConfig.from_pretrained(quantised)
    del config.quantization_config
    save_random_model(plain, config, seed=1)
    for old, new in ((plain, quantised), (quantised, plain)):
        model, info = load_packed(old, "plain")
        before = logits_of(model, info)
        assert apply(model, info, new) == ""
        found = logits_of(model, info)
        assert_equal(found, logits_of(*load_packed(new, "plain")))
        assert not torch.allclose(found[0], before[0])


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0])
def test_a_bfloat16_model_takes_the_weights_of_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """Which have no dtype in common: norms are float32 in every file."""
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", "llama", random_weights("llama", tied=True), kind)
    checkpoint = resolve_checkpoint(str(tmp_path / "tiny.gguf"))
    model = build_decoder(checkpoint.info, Mesh(), torch.bfloat16)
    model.materialize(CPU, 64)
    assert apply(model, checkpoint.info, checkpoint.directory) == ""


def set_nan(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan


def change_dtype(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float16)


def change_shape(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


def leave_out(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.2.self_attn.q_proj.weight"]


def add_one(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.3.self_attn.q_proj.weight"] = tensors["model.layers.2.self_attn.q_proj.weight"].clone()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_nan, "tensor model.layers.1.mlp.up_proj.weight has numbers that are not finite"),
        (change_dtype, "tensor model.norm.weight has dtype float16"),
        (change_shape, r"tensor model.norm.weight has shape \(63,\)"),
        (leave_out, "tensor model.layers.2.self_attn.q_proj.weight is missing"),
        (add_one, "has tensor model.layers.3.self_attn.q_proj.weight, which this model has no place for"),
    ],
)
def test_a_bad_file_is_refused_and_changes_nothing(
    change: Callable[[dict[str, Tensor]], None], reason: str, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save_tiny_model(old, "llama", seed=0)
    save_tiny_model(new, "llama", seed=1)
    tensors = load_file(new / NAME)
    change(tensors)
    save_file(tensors, new / NAME)
    model, info = load_packed(old, "kernels")
    before = logits_of(model, info)
    assert re.search(reason, apply(model, info, new))
    assert_equal(logits_of(model, info), before)


@pytest.mark.parametrize("content", [None, b"", b"\x08\0\0\0\0\0\0\0{broken}"])
def test_what_is_no_safetensors_file_is_refused(content: bytes | None, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save_tiny_model(old, "llama")
    new.mkdir()
    if content is not None:
        (new / NAME).write_bytes(content)
    model, info = load_packed(old, "plain")
    assert NAME in apply(model, info, new)
