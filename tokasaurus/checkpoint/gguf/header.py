"""Reads a GGUF file's header: its metadata, and where each tensor lies.

Nothing in the file is trusted: a damaged one may state an array of 2**60 elements. Needs neither NumPy nor the gguf
library, whose reader takes seconds for a vocabulary. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letter by number of the value type."""
_ALIGNMENT = "general.alignment"
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_MAX_ARRAY = 1 << 24
"""Elements of an array; vocabularies have less than a million."""


class TensorType(NamedTuple):
    """A format of numbers. A block has several numbers of a row, with the scales that they share."""

    name: str
    block_elements: int
    block_bytes: int


_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 40),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
}
"""Types of tensors by their numbers in the format."""
TYPES = {each.name: each for each in _TYPES.values()}


class TensorEntry(NamedTuple):
    """A tensor as the header lists it."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as in torch; the file states them the other way round."""
    begin: int
    """Offset from the start of the file."""
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A file's metadata and tensors."""

    fields: dict[str, Any]
    """Strings, numbers, booleans, and lists of them."""
    tensors: list[TensorEntry]
    """The tensors, in the order of the header."""
    num_bytes: int
    """Bytes of the header, with the padding before the first tensor."""


def read_header(path: Path, wanted: Callable[[str], bool] = lambda _: True) -> Header:
    """wanted: which keys of the metadata to read. Raises ValueError, with the reason, and OSError.

    Every tensor of the result lies within the file and has as many bytes as its shape and type need.
    """
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:  # cannot be mapped
            raise ValueError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _Reader(content).read(wanted)
            except struct.error:
                raise ValueError("the file ends within its header") from None


class _Reader:
    """Walks through the header from its start. Raises ValueError and struct.error."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._size = len(content)
        self._offset = 0

    def read(self, wanted: Callable[[str], bool]) -> Header:
        if self._content[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._skip(4)
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version} or it is big-endian; supported are versions 2 and 3")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        fields: dict[str, Any] = {}
        alignment = 32
        for _ in range(num_fields):
            name = self._string()
            value = self._value(name == _ALIGNMENT or wanted(name))
            if name in fields:
                raise ValueError(f"{name} is in its metadata twice")
            if name == _ALIGNMENT:
                alignment = value
            if wanted(name):
                fields[name] = value
        if type(alignment) is not int or not 8 <= alignment <= _MAX_ALIGNMENT or alignment % 8:
            raise ValueError(f"{_ALIGNMENT} is {alignment!r}")
        listed = [self._tensor() for _ in range(num_tensors)]
        data_start = -(-self._offset // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, kind, shape, offset in listed:
            begin = data_start + offset
            end = begin + prod(shape) // kind.block_elements * kind.block_bytes
            if end > self._size:
                raise ValueError(f"the file is cut off: tensor {name} ends after its end")
            if offset % alignment:
                raise ValueError(f"tensor {name} begins at {offset}, which is not a multiple of {alignment}")
            if name in tensors:
                raise ValueError(f"tensor {name} is in it twice")
            tensors[name] = TensorEntry(name, kind.name, shape, begin, end)
        return Header(fields, list(tensors.values()), min(data_start, self._size))

    def _tensor(self) -> tuple[str, TensorType, tuple[int, ...], int]:
        """Name, type, shape and offset in the data."""
        name = self._string()
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {num_dimensions} dimensions")
        sizes = [self._number("Q") for _ in range(num_dimensions)]
        number = self._number("I")
        if number not in _TYPES:
            raise ValueError(f"tensor {name} has the type {number}, which is unknown")
        if min(sizes) == 0 or sizes[0] % _TYPES[number].block_elements:
            raise ValueError(f"tensor {name} has the shape {sizes}, which its type does not allow")
        return name, _TYPES[number], tuple(reversed(sizes)), self._number("Q")

    def _value(self, is_wanted: bool) -> Any:
        """Any, if it is not wanted."""
        value_type = self._number("I")
        if value_type == _STRING:
            return self._string()
        if value_type != _ARRAY:
            return self._numbers(_letter(value_type), 1)[0]
        element_type, length = self._number("I"), self._number("Q")
        if length > _MAX_ARRAY:
            raise ValueError(f"an array has {length} elements")
        if element_type == _STRING:
            return self._strings(length, is_wanted)
        if is_wanted:
            return list(self._numbers(_letter(element_type), length))
        self._skip(length * struct.calcsize(f"<{_letter(element_type)}"))
        return None

    def _string(self) -> str:
        length = self._number("Q")
        start = self._offset
        self._skip(length)
        return self._content[start : self._offset].decode()

    def _strings(self, count: int, is_wanted: bool) -> list[str]:
        """The next `count` strings. The loop makes no calls, since vocabularies have a hundred thousand strings."""
        content, offset, size = self._content, self._offset, self._size
        read_length = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = offset + 8
            offset = start + read_length(content, offset)[0]
            if offset > size:
                raise ValueError("the file ends within its header")
            if is_wanted:
                strings.append(content[start:offset].decode())
        self._offset = offset
        return strings

    def _numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        start = self._offset
        self._skip(count * struct.calcsize(f"<{letter}"))
        return struct.unpack_from(f"<{count}{letter}", self._content, start)

    def _number(self, letter: str) -> int:
        return int(self._numbers(letter, 1)[0])

    def _skip(self, num_bytes: int) -> None:
        self._offset += num_bytes
        if self._offset > self._size:
            raise ValueError("the file ends within its header")


def _letter(value_type: int) -> str:
    if value_type not in _SCALARS:
        raise ValueError(f"a value has the type {value_type}, which is unknown, or an array in an array")
    return _SCALARS[value_type]
