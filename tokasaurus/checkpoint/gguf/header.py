"""Checks that a GGUF file's counts and lengths fit its size, before the `gguf` library reads it.

The library trusts them: a damaged file would keep it in a loop over an array of 2**60 elements, whose list takes all
memory. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from math import prod
from pathlib import Path

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""By number of the value type."""
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_MAX_ARRAY = 1 << 24
"""Elements of an array. The library creates several objects for each; vocabularies have less than a million."""


def check_gguf_header(path: Path) -> None:
    """Raises ValueError, with the reason, and OSError."""
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:  # cannot be mapped
            raise ValueError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                _Scan(content).check()
            except struct.error:
                raise ValueError("the file ends within its header") from None


class _Scan:
    """Walks through the header from its start. Raises ValueError and struct.error."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._size = len(content)
        self._offset = 0

    def check(self) -> None:
        if self._content[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._skip(4)
        version = self._number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version} or it is big-endian; supported are versions 2 and 3")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        alignment = 32
        for _ in range(num_fields):
            name = self._string()
            value_type = self._number("<I")
            if name == b"general.alignment":
                if value_type != _UINT32:
                    raise ValueError("general.alignment has a wrong type")
                alignment = self._number("<I")
            else:
                self._skip_value(value_type)
        if not 1 <= alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"general.alignment is {alignment}")
        tensors = [self._tensor() for _ in range(num_tensors)]
        data_start = -(-self._offset // alignment) * alignment
        for name, offset, num_bytes in tensors:
            if data_start + offset + num_bytes > self._size:
                raise ValueError(f"the file is cut off: tensor {name.decode(errors='replace')} ends after its end")

    def _tensor(self) -> tuple[bytes, int, int]:
        """Name, offset in the data, and size in bytes."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._string()
        num_dimensions = self._number("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {num_dimensions} dimensions")
        shape = [self._number("<Q") for _ in range(num_dimensions)]
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self._number("<I"))]
        if min(shape) == 0 or shape[0] % block_elements:
            raise ValueError(f"a tensor has the shape {shape}, which its type does not allow")
        return name, self._number("<Q"), prod(shape) // block_elements * block_bytes

    def _skip_value(self, value_type: int) -> None:
        if value_type == _STRING:
            self._string()
        elif value_type == _ARRAY:
            element_type, length = self._number("<I"), self._number("<Q")
            if length > _MAX_ARRAY:
                raise ValueError(f"an array has {length} elements")
            if element_type == _STRING:
                for _ in range(length):
                    self._string()
            else:
                self._skip(length * _scalar_bytes(element_type))
        else:
            self._skip(_scalar_bytes(value_type))

    def _string(self) -> bytes:
        length = self._number("<Q")
        start = self._offset
        self._skip(length)
        return self._content[start : self._offset]

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._content, self._offset)
        self._offset += struct.calcsize(form)
        return int(value)

    def _skip(self, num_bytes: int) -> None:
        self._offset += num_bytes
        if self._offset > self._size:
            raise ValueError("the file ends within its header")


def _scalar_bytes(value_type: int) -> int:
    if value_type not in _SCALAR_BYTES:
        raise ValueError(f"a value has the type {value_type}, which is unknown, or an array in an array")
    return _SCALAR_BYTES[value_type]
