"""A family's GGUF file is the same model as its checkpoint: the same layers, and the same tensors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.helpers.gguf_families import LLAMA4, WITH_EXPERTS, write_family_gguf
from tests.helpers.tiny_model import LONGROPE, option_config, save_random_model
from tests.model.helpers.greedy_decoding import load, run_whole_prompt
from tokasaurus.checkpoint import CheckpointError, read_model_info, resolve_checkpoint, with_safetensors
from tokasaurus.checkpoint.families import FAMILIES
from tokasaurus.checkpoint.gguf.model import num_draft_layers
from tokasaurus.checkpoint.spec import ModelSpec
from tokasaurus.model.parallel.mesh import Mesh

# Where llama.cpp has no key for an option, the value that it takes to be every model's.
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 0, {}),
    ("mistral", 0, {}),
    ("ministral3", 0, {}),
    ("smollm3", 0, {}),
    ("olmo", 0, {}),
    ("olmo", 1, {"attention_bias": False}),
    ("olmo2", 0, {}),
    ("olmo3", 0, {}),
    ("olmo3", 1, {}),
    ("gemma", 0, {}),
    ("gemma2", 0, {"query_pre_attn_scalar": 32}),
    ("gemma2", 1, {"query_pre_attn_scalar": 16}),
    ("gemma3_text", 0, {"query_pre_attn_scalar": 32}),
    ("gemma3_text", 1, {"query_pre_attn_scalar": 16}),
    ("phi", 0, {}),
    ("phi3", 0, {}),
    ("phi3", 1, {"rope_parameters": {**LONGROPE, "short_factor": [1 + i / 8 for i in range(8)]}}),
    ("phi3", 2, {}),
    ("granite", 0, {}),
    ("granite", 1, {}),
    ("glm", 0, {}),
    ("glm4", 0, {}),
    ("glm4", 1, {}),
    ("exaone4", 0, {}),
    ("exaone4", 1, {}),
    ("cohere", 0, {}),
    ("cohere", 1, {"attention_bias": False}),
    ("cohere2", 0, {}),
    ("starcoder2", 0, {}),
    ("nemotron", 0, {}),
    ("nemotron", 1, {}),
    ("arcee", 0, {}),
    ("ernie4_5", 0, {}),
    ("ernie4_5", 1, {}),
    ("seed_oss", 0, {}),
    ("jais2", 0, {}),
    ("jais2", 1, {}),
    ("hunyuan_v1_dense", 0, {}),
    ("hunyuan_v1_dense", 1, {}),
]


def test_every_architecture_is_tested() -> None:
    assert {family for family, _, _ in (*CASES, *WITH_EXPERTS)} | {"qwen2", "qwen3"} >= {
        name for name, family in FAMILIES.items() if family.gguf is not None
    }


def in_float32(spec: ModelSpec) -> ModelSpec:
    """With rotary bases rounded, as files have them."""
    return replace(spec, rotary=tuple(replace(rope, theta=float(np.float32(rope.theta))) for rope in spec.rotary))


def test_a_fused_tensor_of_queries_keys_and_values_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As files of older ChatGLM models have it."""
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    model = save_random_model(tmp_path / "saved", option_config("glm", 0, tied=True))
    write_family_gguf(tmp_path / "model.gguf", model, fuses_heads=True)
    found = resolve_checkpoint(str(tmp_path / "model.gguf"))
    tensors = load_file(with_safetensors(found.directory) / "model.safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert tensors.keys() == saved.keys()
    assert all(tensors[name].equal(tensor) for name, tensor in saved.items())


@pytest.mark.parametrize(("family", "number", "sizes"), CASES)
def test_layers_and_tensors_are_those_of_the_checkpoint(
    family: str, number: int, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    model = save_random_model(tmp_path / "saved", option_config(family, number, tied=family != "phi", **sizes))
    write_family_gguf(tmp_path / "model.gguf", model)
    found = resolve_checkpoint(str(tmp_path / "model.gguf"))
    expected = read_model_info(tmp_path / "saved")
    assert in_float32(found.info.spec) == in_float32(expected.spec)
    assert (found.info.context_length, found.info.tie_embeddings) == (expected.context_length, expected.tie_embeddings)
    tensors = load_file(with_safetensors(found.directory) / "model.safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert tensors.keys() == saved.keys()
    # Adding 1 to a norm's weight rounds it.
    tolerance = 1e-7 if FAMILIES[family].stored.adds_one else 0.0
    for name, tensor in saved.items():
        np.testing.assert_allclose(tensors[name].numpy(), tensor.numpy(), rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("count", [-1, 3, 4, 1.0])
def test_numbers_of_draft_layers_that_cannot_be_are_refused(count: float) -> None:
    fields = {"block_count": 3, "nextn_predict_layers": count}
    with pytest.raises(CheckpointError, match=rf"glm4moe\.nextn_predict_layers is {count}, but there are 3 layers"):
        num_draft_layers(FAMILIES["glm4_moe"], fields)
    assert num_draft_layers(FAMILIES["qwen3_moe"], fields) == 0, "whose files have no such layers"
    assert [num_draft_layers(FAMILIES["glm4_moe"], {**fields, "nextn_predict_layers": each}) for each in range(3)] == [
        *range(3)
    ]


@pytest.mark.parametrize(
    ("family", "computed"),
    [("glm4_moe", 2), ("dots1", 2), ("minimax_m2", 2), ("qwen3_moe", 1), ("mixtral", 1), ("gpt_oss", 3)],
)
def test_experts_chosen_by_another_function_are_refused(
    family: str, computed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's numbers: 1 softmax, 2 sigmoid, 3 softmax of the chosen ones."""
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    (number, sizes), *_ = ((number, sizes) for name, number, sizes in WITH_EXPERTS if name == family)
    model = save_random_model(tmp_path / "saved", option_config(family, number, tied=True, **sizes))
    path = tmp_path / "model.gguf"
    for gating in (1, 2, 3):
        write_family_gguf(path, model, gating=gating)
        if gating == computed:
            assert in_float32(resolve_checkpoint(str(path)).info.spec) == in_float32(
                read_model_info(tmp_path / "saved").spec
            )
            continue
        with pytest.raises(CheckpointError, match=rf"\.expert_gating_func = {gating} is not supported$") as caught:
            resolve_checkpoint(str(path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "is_computed"),
    [
        ("attention.sliding_window", 0, False),  # llama.cpp: no chunks, and no layer but the last without rotary
        ("attention.sliding_window", 4096, False),
        ("attention.sliding_window_pattern", 3, False),
        ("attention.sliding_window", 8192, True),
        ("attention.sliding_window_pattern", 4, True),
        ("expert_gating_func", 1, False),
    ],
)
def test_chunks_and_scores_of_llama_4_that_are_not_the_published_ones_are_refused(
    key: str, value: int, is_computed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    model = save_random_model(tmp_path / "saved", option_config("llama4_text", 0, tied=True, **LLAMA4))
    path = tmp_path / "model.gguf"
    write_family_gguf(path, model, others={key: value})
    if is_computed:
        assert in_float32(resolve_checkpoint(str(path)).info.spec) == in_float32(
            read_model_info(tmp_path / "saved").spec
        )
        return
    with pytest.raises(CheckpointError, match=rf"llama4\.{key} = {value} is not supported$"):
        resolve_checkpoint(str(path))


@pytest.mark.parametrize(("family", "number", "sizes"), WITH_EXPERTS)
def test_families_with_experts_compute_what_transformers_does(
    family: str, number: int, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files have all experts together, but gates and ups apart, other than some checkpoints."""
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    oracle = save_random_model(tmp_path / "saved", option_config(family, number, tied=True, **sizes))
    write_family_gguf(tmp_path / "model.gguf", oracle)
    found = resolve_checkpoint(str(tmp_path / "model.gguf"))
    assert in_float32(found.info.spec) == in_float32(read_model_info(tmp_path / "saved").spec)
    token_ids = torch.arange(40) * 5
    model, info = load(found.directory)
    logits = run_whole_prompt(model, info, Mesh(), None, token_ids)
    with torch.inference_mode():
        expected = oracle(token_ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
