"""Converts a GGUF file to a dequantised directory in Hugging Face format, the only format that other code reads."""

import hashlib
import json
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tokasaurus.checkpoint.cache import CONVERSION_VERSION, build_once, cache_directory
from tokasaurus.checkpoint.gguf.config import architecture_of, generation_config, model_config
from tokasaurus.checkpoint.gguf.tokenizer import write_tokenizer
from tokasaurus.checkpoint.json_files import CheckpointError, write_json

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_ELEMENTS_PER_WRITE = 1 << 22  # 16 MB of float32: the most weights in memory at a time

_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BYTES_PER_ELEMENT = {"F32": 4, "F16": 2, "BF16": 2}

_TOP_MODULES = ("model.embed_tokens", "model.norm", "lm_head")
_LAYER_MODULES = (
    *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
)
_FAMILY_LAYER_TENSORS = {
    "llama": (),
    "qwen2": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "qwen3": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
}
_ROPE_FACTORS = "rope_freqs.weight"

_MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError)
"""What reading metadata of a wrong type or value raises here and in the gguf library."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""By number of the value type."""
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_MAX_ARRAY = 1 << 24
"""Elements of an array. The library creates several objects for each; vocabularies have less than a million."""


@dataclass(frozen=True, slots=True)
class _OutputTensor:
    """A tensor to write to model.safetensors."""

    name: str
    """In Hugging Face format."""
    source: "ReaderTensor"
    dtype: str
    """One of "F32", "F16" and "BF16"."""
    shape: tuple[int, ...]
    head_size: int
    """Rows per attention head, if the rows must be reordered (see `unpermuted_rows`); 0 = keep the order."""

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape))

    @property
    def num_bytes(self) -> int:
        return self.num_elements * _BYTES_PER_ELEMENT[self.dtype]


def convert_gguf(path: Path, on_phase: Callable[[str], None]) -> Path:
    """The file's converted directory in the cache; written on first use, and again if the file has changed or the
    directory is damaged.

    Raises CheckpointError if the file is missing, malformed or not supported.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    stat = path.stat()
    identity = f"{CONVERSION_VERSION} {path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    destination = cache_directory() / "converted" / f"{path.stem}-{key}"

    def convert(directory: Path) -> None:
        on_phase(f"converting {path.name} (once)")
        write_hf_directory(path, directory)

    return build_once(destination, convert)


def write_hf_directory(path: Path, directory: Path) -> None:
    """Write config, generation config, tokenizer and model.safetensors for the GGUF file `path` into `directory`.

    Quantised tensors become float32; float32, float16 and bfloat16 tensors keep their type. Shows a progress bar on a
    terminal. Raises CheckpointError.
    """
    try:
        reader = _open(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        architecture = architecture_of(metadata)
        if metadata.get("split.count", 1) > 1:
            raise CheckpointError("the model is split into several files; merge them first")
        sources = {tensor.name: tensor for tensor in reader.tensors}
        factors = sources.pop(_ROPE_FACTORS, None)
        head_size = metadata.get(f"{architecture}.attention.key_length") or _default_head_size(architecture, metadata)
        num_layers = metadata.get(f"{architecture}.block_count")
        if not isinstance(num_layers, int):
            raise CheckpointError(f"{architecture}.block_count is missing")
        names = _hf_names(architecture, min(num_layers, len(sources)))  # a damaged file may state billions
        outputs = [_plan(architecture, tensor, names, head_size) for tensor in sources.values()]
        if "token_embd.weight" not in sources:
            raise CheckpointError("tensor token_embd.weight is missing")
        config = model_config(
            metadata,
            vocab_size=int(sources["token_embd.weight"].shape[1]),
            tied="output.weight" not in sources,
            dtype=_main_dtype(outputs),
            rope_factors=None if factors is None else np.asarray(factors.data, np.float32),
        )
        write_json(directory / "config.json", config)
        write_json(directory / "generation_config.json", generation_config(metadata))
        write_tokenizer(metadata, directory)
        with (directory / "model.safetensors").open("wb") as file:
            _write_safetensors(file, outputs, f"converting {path.name}")
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except _MALFORMED as error:
        raise CheckpointError(f"{path}: its metadata or tensors are malformed ({error})") from None


def _open(path: Path) -> "GGUFReader":
    from gguf import GGUFReader

    try:
        check_gguf_header(path)
        return GGUFReader(path)
    except (*_MALFORMED, OSError) as error:
        raise CheckpointError(f"not a readable GGUF file ({error})") from None


def _default_head_size(architecture: str, metadata: dict[str, Any]) -> int:
    hidden_size = metadata.get(f"{architecture}.embedding_length")
    num_heads = metadata.get(f"{architecture}.attention.head_count")
    if not isinstance(hidden_size, int) or not isinstance(num_heads, int) or num_heads < 1:
        raise CheckpointError(f"{architecture}.embedding_length or {architecture}.attention.head_count is missing")
    return hidden_size // num_heads


def _plan(architecture: str, tensor: "ReaderTensor", names: Mapping[str, str], head_size: int) -> _OutputTensor:
    if tensor.name not in names:
        raise CheckpointError(f"tensor {tensor.name} does not belong in a {architecture} model")
    dtype = tensor.tensor_type.name if tensor.tensor_type.name in _DTYPE_NAMES else "F32"
    reordered = architecture == "llama" and re.search(r"\.attn_[qk]\.weight$", tensor.name) is not None
    return _OutputTensor(
        name=names[tensor.name],
        source=tensor,
        dtype=dtype,
        shape=tuple(int(size) for size in reversed(tensor.shape)),  # GGUF names the fastest dimension first
        head_size=head_size if reordered else 0,
    )


def _hf_names(architecture: str, num_layers: int) -> dict[str, str]:
    """Name in a GGUF file -> in Hugging Face format, for every tensor of a model."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    tensors = (*(f"{module}.weight" for module in _LAYER_MODULES), *_FAMILY_LAYER_TENSORS[architecture])
    names = [f"{module}.weight" for module in _TOP_MODULES]
    names += [f"model.layers.{layer}.{tensor}" for layer in range(num_layers) for tensor in tensors]
    found = get_tensor_name_map(MODEL_ARCH[architecture.upper()], num_layers)
    return {str(found.get_name(name, try_suffixes=(".weight", ".bias"))): name for name in names}


def _main_dtype(outputs: list[_OutputTensor]) -> str:
    """The dtype of most elements; norms are float32 in every file."""
    counts = dict.fromkeys(_DTYPE_NAMES, 0)
    for output in outputs:
        counts[output.dtype] += output.num_elements
    return _DTYPE_NAMES[max(counts, key=lambda name: counts[name])]


def _write_safetensors(file: BinaryIO, outputs: list[_OutputTensor], title: str) -> None:
    """Does not use the safetensors library, which needs all tensors in memory. NumPy also has no bfloat16.

    Format: https://github.com/huggingface/safetensors#format
    """
    from rich.console import Console
    from rich.progress import Progress

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in outputs:
        end = offset + output.num_bytes
        header[output.name] = {"dtype": output.dtype, "shape": output.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=offset)
        for output in outputs:
            start = file.tell()
            for chunk in _chunks(output):
                progress.advance(task, file.write(chunk.tobytes()))
            assert file.tell() - start == output.num_bytes, f"{output.name}: wrong number of bytes"


def _chunks(output: _OutputTensor) -> Iterator[NDArray[Any]]:
    """The tensor's elements in output order, a few rows at a time."""
    from gguf import dequantize

    rows = output.source.data
    order = None if output.head_size == 0 else unpermuted_rows(output.shape[0], output.head_size)
    num_rows = output.shape[0] if len(output.shape) > 1 else 1
    step = max(1, _ELEMENTS_PER_WRITE * num_rows // output.num_elements) if num_rows > 1 else len(rows)
    quantized = output.source.tensor_type.name not in _DTYPE_NAMES
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step] if order is None else rows[order[start : start + step]]
        try:
            yield dequantize(chunk, output.source.tensor_type) if quantized else chunk
        except NotImplementedError:
            kind = output.source.tensor_type.name
            raise CheckpointError(f"tensor {output.source.name} has type {kind}, which cannot be dequantised") from None


def unpermuted_rows(num_rows: int, head_size: int) -> NDArray[np.intp]:
    """For each row of a Llama q or k matrix in Hugging Face order, the index of this row in a GGUF file.

    Rotary embedding pairs adjacent dimensions (0, 1), (2, 3), … in GGUF, but i and i + head_size / 2 in Hugging Face.
    """
    rows: NDArray[np.intp] = np.arange(num_rows).reshape(-1, head_size // 2, 2).swapaxes(1, 2).reshape(-1)
    return rows


def check_gguf_header(path: Path) -> None:
    """Checks that the file's counts and lengths fit its size. Raises ValueError, with the reason, and OSError.

    The gguf library trusts them: a damaged file would keep it in a loop over an array of 2**60 elements, whose list
    takes all memory. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
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
