"""New weights of classes that tie their LM head to the embedding, each by the names of its own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers.tiny_model import save_byte_tokenizer
from tests.model.by_transformers.helpers.every_class import load_class
from tests.model.by_transformers.helpers.next_token import assert_next_token
from tests.model.by_transformers.helpers.tiny_classes import save_tiny_model, tiny_config
from tests.model.helpers.steps import CPU
from tokasaurus.checkpoint import UpdateChecks, resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.commands import UpdateWeights
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.weight_update import WeightUpdates

HEAD = "lm_head.weight"
EMBEDDINGS = {
    "mixtral": "model.embed_tokens.weight",
    "gpt2": "transformer.wte.weight",
    "opt": "model.decoder.embed_tokens.weight",
}
TIED = pytest.mark.parametrize("family", EMBEDDINGS)


def save_tied(directory: Path, family: str, seed: int, head: Tensor | None = None) -> None:
    """head: stored beside the embedding."""
    config = tiny_config(family)
    config.tie_word_embeddings = True
    save_tiny_model(directory, config, seed)
    save_byte_tokenizer(directory)
    tensors = load_file(directory / "model.safetensors")
    assert EMBEDDINGS[family] in tensors
    assert HEAD not in tensors
    if head is not None:
        save_file({**tensors, HEAD: head}, directory / "model.safetensors", {"format": "pt"})


def embedding_of(directory: Path, family: str) -> Tensor:
    return load_file(directory / "model.safetensors")[EMBEDDINGS[family]].clone()


def save_part(directory: Path, tensors: dict[str, Tensor]) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


class Server:
    """Its checks, in the server's and in the worker's process, of which both must agree."""

    def __init__(self, directory: Path) -> None:
        words = [f"model={directory}", "model_impl=transformers", "rl=T"]
        self._checks = UpdateChecks(resolve_checkpoint(str(directory), impl="transformers"), ServerConfig.parse(words))
        self.model, self.info = load_class(directory)
        self._updates = WeightUpdates(self.model, self.info, directory, Mesh(), CPU)
        self._applied: list[UpdateWeights] = []

    def update(self, directory: Path, is_partial: bool = False) -> str:
        update = UpdateWeights(0, str(directory), "1", is_partial=is_partial)
        self._checks.check(directory, is_partial, self._applied)
        error = self._updates.apply(update)
        self._applied += [] if error else [update]
        return error

    def assert_equals(self, directory: Path) -> None:
        assert_next_token(self.model, self.info, oracle_of(directory))


def oracle_of(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@TIED
@pytest.mark.parametrize("has_head", [True, False])
def test_a_head_beside_the_embedding_must_equal_it(has_head: bool, family: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save_tied(old, family, seed=1)
    if has_head:
        save_tied(old, family, seed=1, head=embedding_of(old, family))
    save_tied(new, family, seed=2)
    server = Server(old)
    server.assert_equals(old)
    embedding = embedding_of(new, family)
    save_tied(new, family, seed=2, head=embedding + 0.3)
    words = f"tensor {HEAD} differs from {EMBEDDINGS[family]} of these weights: this server was started with tied"
    assert server.update(new).startswith(words)
    server.assert_equals(old)
    save_tied(new, family, seed=2, head=embedding)
    assert server.update(new) == ""
    server.assert_equals(new)


@TIED
def test_a_part_with_the_head_alone_must_equal_the_present_embedding(family: str, tmp_path: Path) -> None:
    save_tied(tmp_path / "old", family, seed=1)
    server, old = Server(tmp_path / "old"), embedding_of(tmp_path / "old", family)
    new = old + 0.1
    refused = f"tensor {HEAD} differs from {EMBEDDINGS[family]} of the server's weights, which this part lacks: "
    assert server.update(save_part(tmp_path / "head of old", {HEAD: old}), is_partial=True) == ""
    head = save_part(tmp_path / "head", {HEAD: new})
    assert server.update(head, is_partial=True).startswith(refused)
    embedding = save_part(tmp_path / "embedding", {EMBEDDINGS[family]: new})
    assert server.update(embedding, is_partial=True) == ""
    assert server.update(head, is_partial=True) == ""
    assert server.update(tmp_path / "head of old", is_partial=True).startswith(refused)
    oracle = oracle_of(tmp_path / "old")
    with torch.no_grad():
        oracle.get_input_embeddings().weight.copy_(new)
    assert_next_token(server.model, server.info, oracle)


@TIED
def test_a_head_that_differed_at_the_start_has_updates_of_its_own(family: str, tmp_path: Path) -> None:
    old, new, tied = tmp_path / "old", tmp_path / "new", tmp_path / "tied"
    save_tied(tied, family, seed=1)
    for seed, directory in ((1, old), (2, new)):
        head = torch.randn(embedding_of(tied, family).shape, generator=torch.Generator().manual_seed(seed)) * 0.3
        save_tied(directory, family, seed, head)
    server = Server(old)
    server.assert_equals(old)
    assert server.update(tied) == f"tensor {HEAD} is missing"
    assert server.update(new) == ""
    server.assert_equals(new)
    head = load_file(old / "model.safetensors")[HEAD]
    assert server.update(save_part(tmp_path / "head", {HEAD: head}), is_partial=True) == ""
    tensors = {**load_file(new / "model.safetensors"), HEAD: head}
    save_file(tensors, new / "model.safetensors", {"format": "pt"})
    server.assert_equals(new)


def test_parts_replace_what_they_have(tmp_path: Path) -> None:
    """An expert's matrix, which the class has as a part of a larger one, and a norm."""
    config = tiny_config("mixtral")
    for name, seed in (("old", 1), ("new", 2)):
        save_tiny_model(tmp_path / name, config, seed)
        save_byte_tokenizer(tmp_path / name)
    server = Server(tmp_path / "old")
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("old", "new"))
    names = [name for name in new if "experts.2.w3" in name or "experts.0.w1" in name or name == "model.norm.weight"]
    assert len(names) == 9
    part = {name: new[name] for name in names}
    assert server.update(save_part(tmp_path / "part", part), is_partial=True) == ""
    save_file({**old, **part}, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    server.assert_equals(tmp_path / "old")
