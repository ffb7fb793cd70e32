"""Parts of GGUF tensors are parts of what the gguf library dequantises, and the loaded model is transformers' own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tests.helpers.examples import few
from tokasaurus.checkpoint import CheckpointError, resolve_checkpoint, weight_files, with_safetensors
from tokasaurus.checkpoint.gguf.blocks import BLOCK_TYPES
from tokasaurus.checkpoint.gguf.header import TYPES
from tokasaurus.checkpoint.gguf.model import NOT_WEIGHTS
from tokasaurus.checkpoint.stored_tensors import StoredTensor
from tokasaurus.model.cpu.bindings import BLOCK_TYPES as MULTIPLIED_TYPES
from tokasaurus.model.decoder import tensor_files
from tokasaurus.model.decoder.tensor_files import GGUFFile, open_files, read_shard

QUANTIZED = sorted(TYPES.keys() - {"F32", "F16", "BF16"} - set(NOT_WEIGHTS))
ROWS, COLUMNS, HEAD, BEGIN = 24, 1024, 8, 64
ALL = slice(None)
SHARDS = [(ALL, ALL), (slice(8, 16), ALL), (ALL, slice(256, 512)), (slice(3, 20), slice(5, 801)), (slice(4, 4), ALL)]


def random_blocks(kind: str) -> NDArray[np.uint8]:
    """[ROWS, bytes], all of whose numbers are finite."""
    _, block_elements, block_bytes = TYPES[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (ROWS * COLUMNS // block_elements, block_bytes), np.uint8)
    while True:
        # Any two bytes may be a float16 scale; dequantise each block by itself to find those that are not finite.
        with np.errstate(all="ignore"):
            wrong = ~np.isfinite(dequantize(blocks, Kind[kind])).all(axis=1)
        if not wrong.any():
            return blocks.reshape(ROWS, -1)
        blocks[wrong] = random.integers(0, 256, (wrong.sum(), block_bytes), np.uint8)


def in_file(path: Path, kind: str, stored: NDArray[np.uint8], head: int = 0) -> GGUFFile:
    path.write_bytes(bytes(BEGIN) + stored.tobytes())
    tensor = StoredTensor(path, kind, (ROWS, COLUMNS), BEGIN, BEGIN + stored.size, head)
    return GGUFFile(path, {"w": tensor})


def interleaved(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """llama.cpp's order of each head's rows: 0, 4, 1, 5, 2, 6, 3, 7."""
    order = [
        head + row for head in range(0, ROWS, HEAD) for pair in range(HEAD // 2) for row in (pair, pair + HEAD // 2)
    ]
    return rows[order]


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_shards_are_parts_of_what_the_library_dequantises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_interleaved: bool
) -> None:
    monkeypatch.setattr(tensor_files, "_PART_NUMBERS", 5 * COLUMNS)  # several parts
    rows = random_blocks(kind)
    expected = dequantize(rows, Kind[kind])
    stored = interleaved(rows) if is_interleaved else rows
    with in_file(tmp_path / "x", kind, stored, HEAD if is_interleaved else 0) as file:
        assert file.num_bytes("w") == rows.size
        for shard in SHARDS:
            found = read_shard(file, "w", shard)
            assert found.dtype == torch.float32
            np.testing.assert_array_equal(found.numpy(), expected[shard])
        for shard in SHARDS:
            blocks = file.shard_blocks("w", shard)
            columns = range(COLUMNS)[shard[1]]
            are_whole = not {columns.start % TYPES[kind].block_elements, columns.stop % TYPES[kind].block_elements} - {
                0
            }
            assert (blocks is not None) == (kind in MULTIPLIED_TYPES and are_whole)
            if blocks is not None:
                np.testing.assert_array_equal(blocks.dequantized().numpy(), expected[shard])
        if kind in BLOCK_TYPES:
            for part in (ALL, slice(3, 20)):
                name, blocks = file.blocks("w", part)
                assert name == kind
                np.testing.assert_array_equal(dequantize(blocks.numpy(), Kind[kind]), expected[part])


@few(1, "value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES - {"MXFP4"}))
def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path, kind: str, value: float) -> None:
    block_bytes = TYPES[kind].block_bytes
    wrong = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    found = set()
    for offset in range(block_bytes - 1):
        rows = random_blocks(kind)
        rows[ROWS - 1, -block_bytes + offset : rows.shape[1] - block_bytes + offset + 2] = wrong
        with np.errstate(all="ignore"):
            is_finite = bool(np.isfinite(dequantize(rows, Kind[kind])).all())
        with in_file(tmp_path / "x", kind, rows) as file:
            if is_finite:
                file.blocks("w", ALL)
                continue
            found.add(offset)
            for read in (lambda: file.blocks("w", ALL), lambda: read_shard(file, "w", (ALL, ALL))):
                with pytest.raises(CheckpointError, match="tensor w has blocks whose scales are not finite"):
                    read()
            file.blocks("w", slice(0, ROWS - 1))
    assert 1 <= len(found) <= 6, "one or two scales, or one of their bytes"


def test_an_exponent_whose_numbers_are_not_finite_is_refused(tmp_path: Path) -> None:
    rows = random_blocks("MXFP4")
    rows[:, :: TYPES["MXFP4"].block_bytes] = 252
    rows[:, 1 :: TYPES["MXFP4"].block_bytes] = 0x7F  # the largest number, and the least
    for exponent in (252, 253):
        rows[ROWS - 1, 0] = exponent
        with np.errstate(all="ignore"):
            assert np.isfinite(dequantize(rows, Kind["MXFP4"])).all() == (exponent == 252)
        with in_file(tmp_path / "x", "MXFP4", rows) as file:
            if exponent == 252:
                file.blocks("w", ALL)
                continue
            with pytest.raises(CheckpointError, match="tensor w has blocks whose scales are not finite"):
                file.blocks("w", ALL)


def test_types_that_are_no_weights_are_those_that_the_library_does_not_dequantise() -> None:
    for kind, (_, _, block_bytes) in TYPES.items():
        if kind in NOT_WEIGHTS:
            with pytest.raises(NotImplementedError):
                dequantize(np.zeros((1, block_bytes), np.uint8), Kind[kind])


def everything(files: list[Path]) -> dict[str, torch.Tensor]:
    return {
        name: read_shard(file, name, tuple(ALL for _ in file.shape(name)))
        for file in open_files(files)
        for name in file.names()
    }


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.F16, Kind.BF16, Kind.F32])
def test_the_copy_for_other_programs_has_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", "llama", random_weights("llama", tied=False), kind)
    checkpoint = resolve_checkpoint(str(tmp_path / "tiny.gguf"))
    found = everything(weight_files(checkpoint.directory))
    copy = with_safetensors(checkpoint.directory)
    copied = everything(weight_files(copy))
    assert found.keys() == copied.keys()
    for name, weight in found.items():
        assert copied[name].dtype == weight.dtype
        assert torch.equal(copied[name], weight)
    assert with_safetensors(copy) == copy
    assert copied.keys() == AutoModelForCausalLM.from_pretrained(copy).state_dict().keys()


def test_a_single_number_is_a_vector_of_one(tmp_path: Path) -> None:
    save_file({"beta": torch.tensor(0.5)}, tmp_path / "model.safetensors")
    for file in open_files([tmp_path / "model.safetensors"]):
        assert read_shard(file, "beta", ()).tolist() == [0.5]
