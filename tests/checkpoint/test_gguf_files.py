"""Which files a GGUF model's weights are in: one, or several parts, which must be as they were when it was found."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFReader, get_tensor_name_map

from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tokasaurus.checkpoint import CheckpointError, file_states, resolve_checkpoint, weight_files
from tokasaurus.checkpoint.gguf.model import read_model
from tokasaurus.checkpoint.weight_files import has_weights, read_tensors

F32 = GGMLQuantizationType.F32
PART = "tiny-{:05}-of-00003.gguf"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Of a model of 20 tensors."""
    write_gguf(tmp_path / "tiny.gguf", "llama", random_weights("llama", True), F32, tensors_of_part=8)
    return [tmp_path / PART.format(number) for number in (1, 2, 3)]


def content_of(files: list[Path]) -> dict[str, bytes]:
    return {name: tensor.file.read_bytes()[tensor.begin : tensor.end] for name, tensor in read_tensors(files).items()}


def test_the_weights_stay_in_their_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", True), F32)
    checkpoint = resolve_checkpoint(str(path))
    assert weight_files(checkpoint.directory) == [path]
    assert has_weights(checkpoint.directory)
    assert sum(file.stat().st_size for file in checkpoint.directory.iterdir()) < path.stat().st_size / 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, "tiny.gguf is gone"),
        (os.utime, "tiny.gguf has changed"),
        (lambda path: os.truncate(path, 9999), "changed"),
    ],
)
def test_a_file_that_has_changed_or_is_gone_is_an_error_of_one_line(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", True), F32)
    directory = resolve_checkpoint(str(path)).directory
    before = file_states([path])
    change(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        weight_files(directory)
    assert "\n" not in str(caught.value)
    if path.exists():
        assert file_states([path]) != before


def test_a_pointer_that_is_no_list_of_gguf_files_is_refused(tmp_path: Path) -> None:
    for content in ("{}", '{"files": []}', '{"files": [1]}', '{"files": [{"path": "/etc/passwd"}]}'):
        (tmp_path / "gguf.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"gguf\.json names"):
            weight_files(tmp_path)


def test_all_parts_of_a_model_are_read(tmp_path: Path, parts: list[Path]) -> None:
    checkpoint = resolve_checkpoint(str(parts[0]))
    assert checkpoint.name == "tiny"
    assert weight_files(checkpoint.directory) == parts
    write_gguf(tmp_path / "whole.gguf", "llama", random_weights("llama", True), F32)
    assert content_of(parts) == content_of([tmp_path / "whole.gguf"])


def test_a_part_that_is_missing_or_not_the_first_is_named(parts: list[Path]) -> None:
    with pytest.raises(
        CheckpointError, match=r"tiny-00002-of-00003\.gguf is part 2 of 3 of a model; name its first part"
    ):
        resolve_checkpoint(str(parts[1]))
    checkpoint = resolve_checkpoint(str(parts[0]))
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"no file .*tiny-00002-of-00003\.gguf, part 2 of 3 of the model"):
        resolve_checkpoint(str(parts[0]))
    with pytest.raises(CheckpointError, match=r"tiny-00002-of-00003\.gguf is gone"):
        weight_files(checkpoint.directory)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, parts: list[Path]) -> None:
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(CheckpointError, match=r"in file 3 of 3, split\.no is 1 and split\.count 3"):
        resolve_checkpoint(str(parts[0]))
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(other / "tiny.gguf", "llama", random_weights("llama", False), F32, tensors_of_part=9)
    for path in other.iterdir():
        parts[int(path.name[5:10]) - 1].write_bytes(path.read_bytes())
    resolve_checkpoint(str(parts[0]))
    write_gguf(tmp_path / "tiny.gguf", "llama", random_weights("llama", True), F32, tensors_of_part=8)
    parts[1].write_bytes((other / parts[1].name).read_bytes())
    with pytest.raises(CheckpointError, match=r"tensor \S+ is in tiny-00002-of-00003|split\.tensors\.count is"):
        resolve_checkpoint(str(parts[0]))


@pytest.mark.parametrize("name", ["x-00000-of-00002.gguf", "x-00003-of-00002.gguf", "x-00001-of-99999.gguf"])
def test_numbers_of_parts_that_cannot_be_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="is named as part"):
        resolve_checkpoint(str(tmp_path / name))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_names_are_those_of_the_gguf_library(tmp_path: Path, family: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, family, random_weights(family, tied=False), F32)
    names = get_tensor_name_map(MODEL_ARCH[family.upper()], 2)
    found = list(read_model([path]).tensors)
    assert [names.get_name(name, try_suffixes=(".weight", ".bias")) for name in found] == [
        tensor.name for tensor in GGUFReader(path).tensors
    ]
