"""Counts and lengths in GGUF files that exceed the file are refused before memory is taken for them."""

import struct
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.constants import GGML_QUANT_SIZES

from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tokasaurus.checkpoint.gguf.header import TYPES, read_header


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def header(num_tensors: int, num_fields: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + rest


def array(element_type: int, length: int) -> bytes:
    return string("a") + struct.pack("<IIQ", 9, element_type, length)


def tensor(shape: list[int], kind: int, offset: int) -> bytes:
    return string("t") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


WRONG = {
    "empty": (b"", "empty"),
    "magic": (b"GGML" + bytes(100), "GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "fields": (header(0, 2**60, string("a") + struct.pack("<IB", 0, 1)), "ends within its header"),
    "tensors": (header(2**60, 0, b""), "ends within its header"),
    "array": (header(0, 1, array(0, 2**60)), str(2**60)),
    "short array": (header(0, 1, array(10, 1000)), "ends within its header"),
    "strings": (header(0, 1, array(8, 1000)), "ends within its header"),
    "array of arrays": (header(0, 1, array(9, 1)), "array in an array"),
    "string": (header(0, 1, struct.pack("<Q", 2**63)), "ends within its header"),
    "value type": (header(0, 1, string("a") + struct.pack("<I", 77)), "type 77"),
    "dimensions": (header(1, 0, tensor([1] * 5, 0, 0)), "5 dimensions"),
    "tensor type": (header(1, 0, tensor([32], 1000, 0)), "1000"),
    "block": (header(1, 0, tensor([33], 8, 0)), "[33]"),
    "tensor size": (header(1, 0, tensor([2**62, 2**62], 0, 0)), "cut off"),
    "tensor offset": (header(1, 0, tensor([1], 0, 2**63)), "cut off"),
    "unaligned tensor": (header(1, 0, tensor([1], 0, 8)) + bytes(100), "not a multiple of 32"),
    "tensor twice": (header(2, 0, 2 * tensor([1], 0, 0)) + bytes(100), "tensor t is in it twice"),
    "field twice": (header(0, 2, 2 * (string("a") + struct.pack("<IB", 0, 1))), "a is in its metadata twice"),
    "no UTF-8": (header(0, 1, struct.pack("<Q", 1) + b"\xff" + struct.pack("<IB", 0, 1)), "utf-8"),
    "alignment": (header(0, 1, string("general.alignment") + struct.pack("<II", 4, 12)), "general.alignment is 12"),
    "type of alignment": (header(0, 1, string("general.alignment") + struct.pack("<If", 6, 32)), "alignment is 32.0"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path: Path, kind: str) -> None:
    content, reason = WRONG[kind]
    path = tmp_path / "wrong.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_header(path)
    assert reason in str(caught.value)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16])
def test_a_whole_file_is_accepted_and_a_shorter_one_is_not(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen2", random_weights("qwen2", tied=False), kind)
    read_header(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 64)  # the last tensor is followed by up to 31 bytes of padding
    with pytest.raises(ValueError, match="cut off"):
        read_header(path)


def test_the_types_are_those_of_the_gguf_library() -> None:
    assert {kind.name: (kind.block_elements, kind.block_bytes) for kind in TYPES.values()} == {
        kind.name: sizes for kind, sizes in GGML_QUANT_SIZES.items()
    }


FIELDS: dict[str, object] = {
    "a.string": "größer",
    "a.bool": True,
    "an.int": 2**32 - 1,
    "a.float": 0.1,
    "strings": ["", "a", "größer"],
    "numbers": [1, -2, 3],
    "floats": [0.5, -2.0],
    "flags": [True, False],
}


def test_metadata_and_tensors_are_those_that_the_gguf_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", tied=False), GGMLQuantizationType.Q4_0, FIELDS)
    found, expected = read_header(path), GGUFReader(path)
    values = {key: field.contents() for key, field in expected.fields.items() if not key.startswith("GGUF.")}
    assert found.fields == values
    assert found.fields["strings"] == FIELDS["strings"]
    assert found.num_bytes == expected.data_offset
    assert [
        (each.name, each.type_name, each.shape[::-1], each.begin, each.end - each.begin) for each in found.tensors
    ] == [
        (each.name, each.tensor_type.name, tuple(each.shape), each.data_offset, each.n_bytes)
        for each in expected.tensors
    ]
    assert read_header(path, lambda key: key == "a.float").fields == {"a.float": values["a.float"]}
