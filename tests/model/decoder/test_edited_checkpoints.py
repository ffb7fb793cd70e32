"""Checkpoints made by transformers, then edited, against transformers on the same files, in float32."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.helpers.examples import few
from tests.helpers.tiny_model import FAMILIES, VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import assert_equals_oracle, run_stages
from tokasaurus.checkpoint import fit_to_tensors, read_model_info, weight_files

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKEN_IDS = torch.randint(VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(0))

Tensors = dict[str, torch.Tensor]


def edit(
    directory: Path, config: dict[str, Any], change: Callable[[Tensors], object] = lambda _: None, *removed: str
) -> None:
    """config: keys to set in config.json. change: changes the tensors in place. removed: keys to delete first."""
    path = directory / "config.json"
    old = {key: value for key, value in json.loads(path.read_text()).items() if key not in removed}
    path.write_text(json.dumps(old | config))
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load_oracle(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def assert_equals_transformers(directory: Path, pp_size: int = 1) -> None:
    """Logits, and so greedy tokens: where the two best are far enough apart, they are the same."""
    logits, _ = run_stages(directory, TOKEN_IDS, pp_size)
    with torch.inference_mode():
        expected = load_oracle(directory)(TOKEN_IDS.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    first, second = expected.topk(2).values.unbind(-1)
    is_clear = first - second > 1e-3
    assert torch.equal(logits.argmax(-1)[is_clear], expected.argmax(-1)[is_clear])


def other_head(tensors: Tensors) -> None:
    tensors[HEAD] = torch.randn(VOCAB_SIZE, 64, generator=torch.Generator().manual_seed(1)) * 0.15


def equal_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def only_the_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def head_of_another_dtype(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].to(torch.float16)


def last_row_differs(tensors: Tensors) -> None:
    equal_head(tensors)
    tensors[HEAD][-1, -1] += 1


# What is stored, with tie_word_embeddings -> whether the two matrices are one.
TIED: dict[str, tuple[Callable[[Tensors], object], bool, bool]] = {
    "a head that differs": (other_head, True, False),
    "a head that differs in its last number": (last_row_differs, True, False),
    "an equal head": (equal_head, True, True),
    "an equal head, not to be tied": (equal_head, False, False),
    "only the head": (only_the_head, True, True),
    "only the embedding": (lambda _: None, True, True),
    "a head of another dtype": (head_of_another_dtype, True, False),
}


@few(1, "family", FAMILIES)
@pytest.mark.parametrize("stored", TIED)
def test_the_stored_tensors_decide_whether_embeddings_are_tied(family: str, stored: str, tmp_path: Path) -> None:
    change, flag, is_tied = TIED[stored]
    save_tiny_model(tmp_path, family, tied=True)
    edit(tmp_path, {"tie_word_embeddings": flag}, change)
    info = fit_to_tensors(read_model_info(tmp_path), weight_files(tmp_path))
    assert info.tie_embeddings == is_tied
    assert_equals_transformers(tmp_path)


def test_matrices_of_many_chunks_are_compared_to_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[fit_to_tensors.__module__]
    num_bytes = 4 * VOCAB_SIZE * 64
    for chunk_bytes in (num_bytes, num_bytes - 1, 1000):
        monkeypatch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
        for change, is_tied in ((equal_head, True), (last_row_differs, False)):
            save_tiny_model(tmp_path, "llama", tied=True)
            edit(tmp_path, {}, change)
            assert fit_to_tensors(read_model_info(tmp_path), weight_files(tmp_path)).tie_embeddings == is_tied


@pytest.mark.parametrize("stored", ["a head that differs", "an equal head", "only the head"])
def test_stages_agree_on_which_embedding_is_stored(stored: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", tied=True)
    edit(tmp_path, {}, TIED[stored][0])
    assert_equals_transformers(tmp_path, pp_size=2)


def test_a_head_in_another_file_than_the_embedding_is_compared(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", tied=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for value, is_tied in ((tensors[EMBEDDING].clone(), True), (tensors[EMBEDDING] + 1, False)):
        save_file(tensors, tmp_path / "a.safetensors")
        save_file({HEAD: value}, tmp_path / "b.safetensors")
        weight_map = {**dict.fromkeys(tensors, "a.safetensors"), HEAD: "b.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        info = fit_to_tensors(read_model_info(tmp_path), weight_files(tmp_path))
        assert info.tie_embeddings == is_tied


@pytest.mark.parametrize("kind", ["both", "shards gone", "shards only"])
@few(1, "family", FAMILIES)
def test_the_file_that_transformers_reads_is_served(family: str, kind: str, tmp_path: Path) -> None:
    """The single file is another model than the shards."""
    save_tiny_model(tmp_path, family, max_shard_size="300KB", seed=1)
    assert len(weight_files(tmp_path)) > 1
    if kind == "shards gone":
        for file in weight_files(tmp_path):
            file.unlink()
    if kind != "shards only":
        save_tiny_model(tmp_path / "other", family, seed=2)
        (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert_equals_transformers(tmp_path)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
DEFAULT = {"rope_type": "default", "rope_theta": 1e5}

# Rotary settings, which replace those of the checkpoint.
ROTARY: dict[str, dict[str, Any]] = {
    "nothing": {},
    "rope_theta": {"rope_theta": 5e4},
    "rope_theta, nothing else": {"rope_theta": 5e4, "rope_scaling": None, "rope_parameters": None},
    "linear by type": {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear by rope_type": {"rope_scaling": {"rope_type": "linear", "factor": 4}},
    "linear in rope_parameters": {"rope_parameters": {"type": "linear", "factor": 3.0, "rope_theta": 2e4}},
    "two types": {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 4.0}},
    "yarn by type": {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
    "yarn over rope_parameters": {"rope_parameters": DEFAULT, "rope_scaling": {"type": "yarn", **YARN}},
    "yarn over rope_parameters, theta beside both": {
        **{"rope_parameters": DEFAULT, "rope_theta": 3e5},
        "rope_scaling": {"rope_type": "yarn", **YARN},
    },
    "yarn over rope_parameters, theta inside": {
        "rope_parameters": DEFAULT,
        "rope_scaling": {"rope_type": "yarn", "rope_theta": 2e5, **YARN},
    },
    "linear over llama3": {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "llama3 over yarn": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN},
        "rope_scaling": {"type": "llama3", "original_max_position_embeddings": 64, **LLAMA3},
    },
    "no rope_scaling over yarn": {"rope_parameters": {"rope_type": "yarn", **YARN}, "rope_scaling": {}},
    "yarn, theta beside": {"rope_parameters": {"rope_type": "yarn", **YARN}, "rope_theta": 3e4},
    "yarn, theta at both places": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 7e4, **YARN},
        "rope_theta": 3e4,
    },
    "yarn, attention_factor": {"rope_scaling": {"type": "yarn", "attention_factor": 0.7, **YARN}},
    "yarn, mscale": {"rope_scaling": {"type": "yarn", "mscale": 0.9, "mscale_all_dim": 0.3, **YARN}},
    "yarn, mscale alone": {"rope_scaling": {"type": "yarn", "mscale": 0.5, **YARN}},
    "yarn, mscale of 0": {"rope_scaling": {"type": "yarn", "mscale": 0.5, "mscale_all_dim": 0, **YARN}},
    "yarn, betas": {"rope_scaling": {"type": "yarn", "beta_fast": 8, "beta_slow": 2.5, **YARN}},
    "yarn, betas of 0": {"rope_scaling": {"type": "yarn", "beta_fast": 0, "beta_slow": None, **YARN}},
    "yarn, not truncated": {"rope_scaling": {"type": "yarn", "truncate": False, **YARN}},
    "yarn, truncate null": {"rope_scaling": {"type": "yarn", "truncate": None, **YARN}},
    "yarn, no factor": {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 64}},
    "yarn, no original length": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn, original length beside": {
        "original_max_position_embeddings": 48,
        "rope_scaling": {"type": "yarn", **YARN},
    },
    "yarn, factor below 1": {"rope_scaling": {"type": "yarn", "factor": 0.5, "original_max_position_embeddings": 32}},
    "llama3, original length": {"rope_scaling": {"type": "llama3", "original_max_position_embeddings": 64, **LLAMA3}},
    "llama3, nothing between": {  # Llama 4 Scout's
        "rope_scaling": {"type": "llama3", "original_max_position_embeddings": 64, **LLAMA3, "high_freq_factor": 1.0}
    },
    "llama3, no original length": {"rope_theta": 1e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    "llama3, original length beside": {
        "original_max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "llama3", **LLAMA3},
    },
    "default with a factor": {"rope_scaling": {"type": "default", "factor": 8.0}},
    "keys of other types": {
        "rope_scaling": {
            **{"type": "linear", "factor": 2.0, "attention_factor": 3.0, "finetuned": True, "mrope_section": [4, 2, 2]},
            **{"partial_rotary_factor": 1.0, "original_max_position_embeddings": 16},
        }
    },
}


@few(1, "family", FAMILIES)
@pytest.mark.parametrize("settings", ROTARY)
def test_rotary_settings_are_applied_as_in_transformers(family: str, settings: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family)
    edit(tmp_path, ROTARY[settings], lambda _: None, "rope_parameters")
    assert_equals_transformers(tmp_path)


@pytest.mark.long
def test_each_rotary_setting_gives_other_logits(tmp_path: Path) -> None:
    """Or the comparison above would show nothing."""
    save_tiny_model(tmp_path, "qwen3")
    config = (tmp_path / "config.json").read_text()
    found = []
    for settings in ROTARY.values():
        (tmp_path / "config.json").write_text(config)
        edit(tmp_path, settings, lambda _: None, "rope_parameters")
        found.append(run_stages(tmp_path, TOKEN_IDS)[0][-1])
    distinct = {tuple(logits.mul(1e3).round().tolist()) for logits in found}
    assert len(distinct) >= 20


# The flag rope_scaling= -> the context length of a model whose original length is 512.
FLAGS: dict[str, tuple[dict[str, Any], int]] = {
    "none": ({"rope_type": "default"}, 512),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 2048),
    "linear by type": ({"type": "linear", "factor": 1.5}, 768),
    "llama3": ({"rope_type": "llama3", **LLAMA3}, 4096),
    "llama3, original length": ({"rope_type": "llama3", "original_max_position_embeddings": 128, **LLAMA3}, 1024),
    "yarn": ({"rope_type": "yarn", "factor": 4.0}, 2048),
    "yarn, original length": ({"rope_type": "yarn", **YARN, "beta_fast": 8, "truncate": False}, 512),
    "yarn, theta": ({"rope_type": "yarn", "rope_theta": 3e4, "factor": 3.0, "attention_factor": 0.7}, 1536),
}


@few(1, "family", FAMILIES)
@pytest.mark.parametrize("flag", FLAGS)
def test_rope_scaling_replaces_the_checkpoints_own_as_in_transformers(family: str, flag: str, tmp_path: Path) -> None:
    scaling, context_length = FLAGS[flag]
    save_tiny_model(tmp_path, family)
    edit(tmp_path, {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}})
    config = AutoConfig.from_pretrained(tmp_path)
    parameters = {"rope_type": scaling.get("type"), "rope_theta": config.rope_parameters["rope_theta"], **scaling}
    if parameters["rope_type"] in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", 512)
    config.rope_parameters = parameters
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(TOKEN_IDS.unsqueeze(0)).logits[0]
    logits, _ = run_stages(tmp_path, TOKEN_IDS, rope_scaling=scaling)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    assert read_model_info(tmp_path, scaling).context_length == context_length


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_yarn_is_applied_in_chunked_batches_on_every_backend(backend: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2")
    edit(tmp_path, ROTARY["yarn by type"], lambda _: None, "rope_parameters")
    assert_equals_oracle(tmp_path, load_oracle(tmp_path), backend, seed=3)


WITHOUT_EFFECT: dict[str, Any] = {
    **{"attention_dropout": 0.5, "initializer_range": 0.5, "pretraining_tp": 2, "use_cache": False, "bos_token_id": 3},
    **{"max_window_layers": 1, "chunk_size_feed_forward": 2, "output_hidden_states": True},
    **{"pad_token_id": 5, "problem_type": "regression", "id2label": {"0": "a"}, "transformers_version": "4.0.0"},
    **{
        "temperature": 0.5,
        "repetition_penalty": 3.0,
        "suppress_tokens": [1, 2],
        "no_such_key": 7,
        "gradient_checkpointing": True,
    },
    **{"is_causal": True, "partial_rotary_factor": 1.0, "hidden_act": "swish", "per_layer_config": None},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_without_effect_have_none_in_transformers_either(family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family)
    before, _ = run_stages(tmp_path, TOKEN_IDS)
    own = {"sliding_window": 8, "use_sliding_window": False} if family != "llama" else {"use_sliding_window": True}
    own |= {"attention_bias": True, "mlp_bias": True} if family == "qwen2" else {}
    edit(tmp_path, {**WITHOUT_EFFECT, **own, "layer_types": ["full_attention", "attention", "full_attention"]})
    with torch.inference_mode():
        expected = load_oracle(tmp_path)(TOKEN_IDS.unsqueeze(0), return_dict=True).logits[0]
    torch.testing.assert_close(before, expected, atol=2e-4, rtol=1e-4)
    assert torch.equal(run_stages(tmp_path, TOKEN_IDS)[0], before)
