"""Writes a model's quantised weights as plain safetensors, for programs that do not read GGUF files or the formats of
quantised safetensors."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokasaurus.checkpoint.cache import CHECKSUMS
from tokasaurus.checkpoint.gguf.blocks import MappedTensors
from tokasaurus.checkpoint.gguf.model import is_gguf
from tokasaurus.checkpoint.gguf.pointer import POINTER_NAME
from tokasaurus.checkpoint.info import read_model_info
from tokasaurus.checkpoint.json_files import read_json, write_json
from tokasaurus.checkpoint.quantized.config import QUANTIZATION_KEYS, SETTINGS_FILES
from tokasaurus.checkpoint.quantized.numbers import QuantizedReader
from tokasaurus.checkpoint.quantized.tensors import QuantizedTensor
from tokasaurus.checkpoint.stored_tensors import StoredTensor
from tokasaurus.checkpoint.tokenizer_files import TOKENIZER_PATTERNS
from tokasaurus.checkpoint.weight_files import INDEX_NAME, SINGLE_NAME, read_tensors, weight_files, write_header

_PLAIN_GGUF = ("F32", "F16", "BF16")
_COPIED = (*TOKENIZER_PATTERNS, "additional_chat_templates/*.jinja")
"""Patterns for the names of files, which include config.json and generation_config.json."""
_LEFT_OUT = (POINTER_NAME, CHECKSUMS, INDEX_NAME, *SETTINGS_FILES)
_FLOAT_BYTES = 4
_PART_NUMBERS = 1 << 22


def write_dequantized(directory: Path, destination: Path) -> None:
    """Copy a model's configuration and tokenizer, and write its weights as `destination`/model.safetensors.

    Quantised tensors become float32; others keep their type. Raises CheckpointError."""
    files = weight_files(directory)
    quantization = None if is_gguf(files[0]) else read_model_info(directory).quantization
    found = read_tensors(files, quantization)
    tensors = {name: found[name] for path in files for name in found if found[name].file == path}
    for path in [path for pattern in _COPIED for path in directory.glob(pattern)]:
        if path.is_file() and path.name not in _LEFT_OUT:
            copy = destination / path.relative_to(directory)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    config = read_json(directory / "config.json")
    write_json(destination / "config.json", {key: config[key] for key in config if key not in QUANTIZATION_KEYS})
    with (destination / SINGLE_NAME).open("wb") as output:
        # the safetensors library would need all of them in memory
        write_header(output, ((name, *_as_written(tensor)) for name, tensor in tensors.items()))
        for path in files:
            in_file = {name: tensor for name, tensor in tensors.items() if tensor.file == path}
            for part in _parts_of_gguf(path, in_file) if is_gguf(path) else _parts(in_file):
                output.write(part.data)


def _as_written(tensor: StoredTensor) -> tuple[str, tuple[int, ...], int]:
    """dtype, shape and bytes."""
    if is_plain(tensor):
        return tensor.dtype, tensor.shape, tensor.end - tensor.begin
    return "F32", tensor.shape, _FLOAT_BYTES * prod(tensor.shape)


def is_plain(tensor: StoredTensor) -> bool:
    """Whether its numbers are stored as such. tensor: of `read_tensors`."""
    if is_gguf(tensor.file):
        return tensor.dtype in _PLAIN_GGUF
    return not isinstance(tensor, QuantizedTensor)


def _parts_of_gguf(path: Path, tensors: Mapping[str, StoredTensor]) -> Iterator[NDArray[Any]]:
    """The numbers of a file's tensors, one after another."""
    with closing(MappedTensors(path, tensors, os.cpu_count() or 1)) as mapped:
        for name, tensor in tensors.items():
            for rows in _row_parts(tensor):
                if is_plain(tensor):
                    yield np.ascontiguousarray(mapped.stored_rows(name, rows))
                else:
                    yield mapped.dequantized(name, rows, slice(None))


def _parts(tensors: Mapping[str, StoredTensor]) -> Iterator[NDArray[Any]]:
    """The numbers of a safetensors file's tensors, one after another."""
    with closing(QuantizedReader(os.cpu_count() or 1)) as reader:
        for name, tensor in tensors.items():
            if isinstance(tensor, QuantizedTensor) and tensor.is_stack:
                for index in range(tensor.shape[0]):
                    found = reader.dequantized(name, tensor.matrix(index), slice(None), slice(None))
                    yield np.ascontiguousarray(found.T)
            elif isinstance(tensor, QuantizedTensor):
                for rows in _row_parts(tensor):
                    yield reader.dequantized(name, tensor, rows, slice(None))
            else:
                yield reader.stored_bytes(tensor)


def _row_parts(tensor: StoredTensor) -> Iterator[slice]:
    """A vector is a matrix with one row."""
    num_rows, step = prod(tensor.shape[:-1]), max(1, _PART_NUMBERS // tensor.shape[-1])
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
