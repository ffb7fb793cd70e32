"""Resolving local names; see test_hub.py for repositories and test_gguf_conversion.py for GGUF files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from transformers.utils.peft_utils import find_adapter_config_file

from tests.checkpoint.helpers.fake_hub import CONFIG, TOKENIZER, weights
from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tokasaurus.checkpoint import CheckpointError, read_model_info, resolve_checkpoint
from tokasaurus.text.tokenizer import Tokenizer


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text(TOKENIZER)
    (directory / "model.safetensors").write_bytes(weights())
    return directory


def test_a_directory_is_served_under_its_name(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = resolve_checkpoint(str(model_directory))
    assert checkpoint.name == "my-model"
    assert checkpoint.directory == model_directory
    assert Tokenizer.load(checkpoint.tokenizer_directory).encode("ab", add_special_tokens=False) == [0, 1]
    assert checkpoint.info == read_model_info(model_directory)
    monkeypatch.chdir(model_directory)
    assert resolve_checkpoint(".") == checkpoint


def test_a_link_is_served_under_its_own_name_and_followed_once(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a hub's cache and trainers have: a link whose target changes while the server runs."""
    link, other = tmp_path / "latest", tmp_path / "step-2"
    link.symlink_to(model_directory)
    plain = resolve_checkpoint(str(model_directory))
    monkeypatch.chdir(tmp_path)
    for given in (str(link), f"{link}/", "latest", "latest/", "./latest//", f"{model_directory}/../latest"):
        found = resolve_checkpoint(given)
        assert found.name == "latest", given
        assert replace(found, name="my-model") == plain
    assert resolve_checkpoint(str(model_directory), "latest/").tokenizer_directory == plain.tokenizer_directory
    monkeypatch.chdir(link)
    assert resolve_checkpoint(".").name == "my-model", "a process knows no other name of its directory"
    link.unlink()
    link.symlink_to(other)
    with pytest.raises(CheckpointError, match=r"latest is a link to .*step-2, which does not exist$"):
        resolve_checkpoint(str(link))


@pytest.mark.parametrize(
    ("target", "link", "name"),
    [
        ("step-2.gguf", "latest.gguf", "latest"),
        ("step-2.gguf", "latest", "latest"),
        ("2fa91b", "tiny.gguf", "tiny"),  # as in the hub's cache
        ("big-00001-of-00002.gguf", "big.gguf", "big"),
        ("big-00001-of-00002.gguf", "latest", "latest"),
    ],
)
def test_a_link_to_a_gguf_file_is_served_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, link: str, name: str
) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "files").mkdir()
    weights = random_weights("llama", tied=True)
    if "-of-" in target:
        tensors_of_part = -(-len(weights) // 2)
        write_gguf(tmp_path / "files" / "big.gguf", "llama", weights, Kind.F16, tensors_of_part=tensors_of_part)
    else:
        write_gguf(tmp_path / "files" / "tiny.gguf", "llama", weights, Kind.F16)
        (tmp_path / "files" / "tiny.gguf").rename(tmp_path / "files" / target)
    (tmp_path / link).symlink_to(tmp_path / "files" / target)
    for given in (str(tmp_path / link), f"{tmp_path / link}/"):
        found = resolve_checkpoint(given)
        assert (found.name, found.info.num_layers) == (name, 2)
    assert resolve_checkpoint(given, str(tmp_path / link)) == found


def test_the_tokenizer_may_be_in_another_directory(model_directory: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "tokenizer"
    elsewhere.mkdir()
    (model_directory / "tokenizer.json").rename(elsewhere / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"my-model has no tokenizer\.json, .* tokenizer="):
        resolve_checkpoint(str(model_directory))
    directory = resolve_checkpoint(str(model_directory), str(elsewhere)).tokenizer_directory
    assert Tokenizer.load(directory).encode("ab", add_special_tokens=False) == [0, 1]


def test_weights_that_are_not_read_are_one_log_line(model_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolve_checkpoint(str(model_directory))
    assert not caplog.messages
    (model_directory / "model.safetensors.index.json").write_text('{"weight_map": {"x": "old.safetensors"}}')
    resolve_checkpoint(str(model_directory))
    (line,) = caplog.messages
    assert "old.safetensors, which is not read" in line


def test_missing_weights_are_an_error_before_anything_starts(model_directory: Path) -> None:
    (model_directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        resolve_checkpoint(str(model_directory))


def test_a_name_that_is_no_directory_gguf_file_or_repository_is_refused(model_directory: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"is neither a directory nor a \.gguf file nor a Hugging Face repository id"
    ):
        resolve_checkpoint(str(model_directory / "absent"))
    with pytest.raises(CheckpointError, match=r"is a file, but not a \.gguf file"):
        resolve_checkpoint(str(model_directory / "model.safetensors"))


def test_an_adapter_that_transformers_would_apply_is_refused(
    model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It looks for this file alone: see find_adapter_config_file, and AutoModelForCausalLM.from_pretrained."""
    (model_directory / "adapter_model.safetensors").write_bytes(weights())
    resolve_checkpoint(str(model_directory))
    assert find_adapter_config_file(str(model_directory)) is None
    assert caplog.messages == [
        "adapter_model.safetensors is not read: without adapter_config.json, nothing says how to apply it"
    ]
    (model_directory / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "r": 8}')
    assert find_adapter_config_file(str(model_directory)) is not None
    with pytest.raises(
        CheckpointError, match=r"my-model has an adapter \(adapter_config.json\), which transformers adds"
    ):
        resolve_checkpoint(str(model_directory))
    (model_directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"my-model is an adapter for 'org/base', not a model: merge it") as error:
        resolve_checkpoint(str(model_directory))
    assert error.value.exit_code == 2
    (model_directory / "config.json").write_text(json.dumps(CONFIG))
    elsewhere = tmp_path / "plain"
    shutil.copytree(model_directory, elsewhere, ignore=shutil.ignore_patterns("adapter*"))
    assert resolve_checkpoint(str(elsewhere), str(model_directory)).name == "plain", "it has a tokenizer too"
