"""Resolving local names; see test_hub.py for repositories and test_gguf_conversion.py for GGUF files."""

import json
from pathlib import Path

import pytest

from tests.checkpoint.helpers.fake_hub import CONFIG, TOKENIZER, weights
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
