"""Checkpoints made by transformers, then edited, against transformers on the same files, in float32."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers.tiny_model import FAMILIES, VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import run_stages
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stored", TIED)
def test_the_stored_tensors_decide_whether_embeddings_are_tied(family: str, stored: str, tmp_path: Path) -> None:
    change, flag, is_tied = TIED[stored]
    save_tiny_model(tmp_path, family, tied=True)
    edit(tmp_path, {"tie_word_embeddings": flag}, change)
    info = fit_to_tensors(read_model_info(tmp_path), weight_files(tmp_path))
    assert info.tie_embeddings == is_tied
    assert_equals_transformers(tmp_path)


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
@pytest.mark.parametrize("family", FAMILIES)
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
