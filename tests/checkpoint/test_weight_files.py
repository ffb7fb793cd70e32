"""The safetensors files of a checkpoint directory."""

import json
from pathlib import Path

import pytest

from tokasaurus.checkpoint import CheckpointError, weight_files


def write_index(directory: Path, *names: object) -> None:
    weight_map = {f"tensor{i}": name for i, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_without_an_index_only_model_safetensors_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "other.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_each_file_in_the_index_is_listed_once(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "unused.safetensors"):
        (tmp_path / name).touch()
    write_index(tmp_path, "b.safetensors", "a.safetensors", "b.safetensors")
    assert weight_files(tmp_path) == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors and no"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"\.bin weights are not read"):
        weight_files(tmp_path)
    (tmp_path / "a.safetensors").touch()
    write_index(tmp_path, "a.safetensors", "b.safetensors")
    with pytest.raises(CheckpointError, match=r"has no b\.safetensors, which model\.safetensors\.index\.json names"):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", 3])
def test_an_index_may_not_name_a_file_outside_its_directory(tmp_path: Path, name: object) -> None:
    write_index(tmp_path, name)
    with pytest.raises(CheckpointError, match="not a file name"):
        weight_files(tmp_path)
