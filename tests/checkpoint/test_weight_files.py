"""The safetensors files of a checkpoint directory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from tests.checkpoint.helpers.gguf_files import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, MLP, VOCAB, random_weights
from tests.helpers.plain_info import plain_info
from tokasaurus.checkpoint import CheckpointError, RopeInfo, check_weight_sizes, weight_files
from tokasaurus.checkpoint.weight_files import unread_index


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


@pytest.mark.parametrize("shards", [(), ("a.safetensors", "b.safetensors")])
def test_the_single_file_is_the_model_though_an_index_names_shards(shards: tuple[str, ...], tmp_path: Path) -> None:
    """As in transformers; see test_the_file_that_transformers_reads_is_served."""
    for name in ("model.safetensors", *shards):
        (tmp_path / name).touch()
    assert unread_index(tmp_path) is None
    write_index(tmp_path, "b.safetensors", "a.safetensors")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    line = unread_index(tmp_path)
    assert line is not None
    for name in ("model.safetensors is the model", "model.safetensors.index.json", "a.safetensors, which is not read"):
        assert name in line
    (tmp_path / "model.safetensors").unlink()
    assert unread_index(tmp_path) is None


def test_an_index_of_the_single_file_or_a_malformed_one_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    write_index(tmp_path, "model.safetensors")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    assert unread_index(tmp_path) is None
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    assert "model.safetensors.index.json" in str(unread_index(tmp_path))


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


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", 3, "..", ".", "", "a\\b", "a\0b", "a" * 300, None]
)
def test_an_index_may_not_name_a_file_outside_its_directory(tmp_path: Path, name: object) -> None:
    write_index(tmp_path, name)
    with pytest.raises(CheckpointError, match="not a file name"):
        weight_files(tmp_path)


def test_a_directory_is_no_weight_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        weight_files(tmp_path)


SIZES: dict[str, Any] = {
    "family": "llama",
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
    "context_length": 256,
    "norm_eps": 1e-5,
    "rope": RopeInfo(1e4),
    "tie_embeddings": True,
    "eos_ids": (),
    "dtype": "float32",
}
INFO = plain_info(**SIZES)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(random_weights("llama", tied=True), path)
    return path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": 1 << 24}, "model.embed_tokens.weight"),
        ({"hidden_size": 1 << 24}, "model.embed_tokens.weight"),
        ({"head_dim": 1 << 14}, "q_proj"),
        ({"num_kv_heads": 4}, "k_proj"),
        ({"intermediate_size": 1 << 24}, "gate_proj"),
        ({"num_layers": 10_000}, "lacks tensor model.layers.2."),
    ],
)
def test_sizes_that_the_weights_do_not_have_are_refused(weights: Path, change: dict[str, Any], named: str) -> None:
    check_weight_sizes([weights], INFO)
    with pytest.raises(CheckpointError) as caught:
        check_weight_sizes([weights], plain_info(**SIZES | change))
    assert named in str(caught.value)


def _with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def write(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        encoded = json.dumps(header).encode()
        return len(encoded).to_bytes(8, "little") + encoded + content[8 + length :]

    return write


NORM = "model.norm.weight"
DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "cut off"),
    "cut in the header": (lambda content: content[:100], "cut off"),
    "cut in the data": (lambda content: content[:-1], "cut off"),
    "endless header": (lambda content: (2**63).to_bytes(8, "little") + content[8:], "cut off"),
    "not JSON": (lambda content: content[:8] + b"[" + content[9:], "not a readable safetensors file"),
    "nested": (lambda _: (5000).to_bytes(8, "little") + b"[" * 5000, "nested too deeply"),
    "offsets": (_with_header(lambda header: header[NORM].update(data_offsets=[8, 0])), NORM),
    "shape": (_with_header(lambda header: header[NORM].update(shape=[2**62, 2**62])), NORM),
    "negative": (_with_header(lambda header: header[NORM].update(shape=[-1])), NORM),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_header_is_refused(weights: Path, kind: str) -> None:
    damage, named = DAMAGED[kind]
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(CheckpointError) as caught:
        check_weight_sizes([weights], INFO)
    assert named in str(caught.value)
    assert str(caught.value).isprintable()
