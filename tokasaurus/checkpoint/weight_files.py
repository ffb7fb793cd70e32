"""Finds the files that contain a model's weights, and checks their headers.

Whether a checkpoint's LM head is its embedding is decided by the stored tensors, as in transformers. config.json only
says whether the two may be one (tie_word_embeddings). They are where one of them is missing, or both are equal. Where
they differ, each is used as it is stored.

Format: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import lcm, prod
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from tokasaurus.checkpoint.families import FAMILIES
from tokasaurus.checkpoint.gguf.header import TYPES
from tokasaurus.checkpoint.gguf.model import is_gguf, read_model
from tokasaurus.checkpoint.gguf.pointer import POINTER_NAME, read_pointer
from tokasaurus.checkpoint.info import EMBEDDING, HEAD, ModelInfo
from tokasaurus.checkpoint.json_files import CheckpointError, parse_json, read_json, unreadable
from tokasaurus.checkpoint.pooling import fit_head
from tokasaurus.checkpoint.quantized.config import Quantization
from tokasaurus.checkpoint.quantized.tensors import QuantizedTensor, join_tensors
from tokasaurus.checkpoint.spec import ROUTER, ExpertsSpec, LayerSpec
from tokasaurus.checkpoint.stored_tensors import StoredTensor
from tokasaurus.messages.commands import FileState

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""

_LENGTH_BYTES = 8
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of a number, for the dtypes that checkpoints of the supported families contain. The size of others is not
checked."""

TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Begin the names of a text model's tensors in checkpoints with a model for images -> without it."""

_OF_BARE_MODEL = re.compile(r"(layers\.[0-9]|embed_tokens\.|norm\.|final_layernorm\.)")
"""Begins the names of tensors in checkpoints of a model that was saved without its LM head, and without "model."."""

_OF_AN_EXPERT = re.compile(r"\.experts\.[0-9]+\.")
_CHUNK_BYTES = 1 << 24
_GGUF_BYTES = 1 << 20
"""Bytes of a GGUF file's beginning that file_states hashes: enough metadata to tell files with the same time apart."""


def weight_file_names(directory: Path) -> list[str]:
    """Names of the safetensors files that are the model, in transformers' order of preference: the single file, else
    the shards in the index, sorted. Opens no weight file. Raises CheckpointError if the index is malformed."""
    if (directory / SINGLE_NAME).is_file() or not (directory / INDEX_NAME).exists():
        return [SINGLE_NAME]
    return _names_in_index(directory / INDEX_NAME)


def update_files(directory: Path) -> list[Path]:
    """Files of new weights: as of a checkpoint; without an index, all safetensors files. Raises CheckpointError if
    there are none."""
    if not (directory / INDEX_NAME).exists() and (files := sorted(directory.glob("*.safetensors"))):
        return files
    return weight_files(directory)


def file_states(files: Sequence[Path]) -> tuple[FileState, ...]:
    """Reads the files' headers; of a GGUF file, its beginning. Raises OSError."""
    states = []
    for path in files:
        with path.open("rb") as file:
            length = _GGUF_BYTES if is_gguf(path) else int.from_bytes(file.read(_LENGTH_BYTES), "little")
            num_bytes = min(MAX_HEADER_BYTES, length)
            digest = hashlib.sha256(file.read(num_bytes)).hexdigest()
            states.append(FileState(path.name, digest, os.fstat(file.fileno()).st_mtime_ns))
    return tuple(states)


def unread_index(directory: Path) -> str | None:
    """One line for the user if the directory also has an index of other files, which are then not the model."""
    index_path = directory / INDEX_NAME
    if not index_path.exists() or weight_file_names(directory) != [SINGLE_NAME]:
        return None
    try:
        names = [name for name in _names_in_index(index_path) if name != SINGLE_NAME]
    except CheckpointError:
        names = ["nothing that can be read"]
    if not names:
        return None
    return f"{directory}: {SINGLE_NAME} is the model; {INDEX_NAME} beside it names {names[0]}, which is not read"


def _names_in_index(index_path: Path) -> list[str]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path} has no weight_map")
    for name in weight_map.values():
        # The index is untrusted: a name must not lead out of the directory.
        if not isinstance(name, str) or not _is_file_name(name):
            raise CheckpointError(f"{index_path} names {name!r}, which is not a file name")
    return sorted(set(weight_map.values()))


def _is_file_name(name: str) -> bool:
    """Whether every file system may have a file of this name in a directory."""
    return name.isprintable() and name not in ("", ".", "..") and not set("/\\") & set(name) and len(name) <= 200


def has_weights(directory: Path) -> bool:
    """Whether all files are there that `weight_files` would return. Raises CheckpointError as it does."""
    return _is_of_gguf(directory) or all((directory / name).is_file() for name in weight_file_names(directory))


def weight_files(directory: Path) -> list[Path]:
    """Paths of the safetensors files, or of the GGUF files that the directory was made for. Raises CheckpointError,
    naming the first one that does not exist."""
    if _is_of_gguf(directory):
        return read_pointer(directory)
    paths = [directory / name for name in weight_file_names(directory)]
    for path in paths:
        if path.is_file():
            continue
        if path.name != SINGLE_NAME:
            raise CheckpointError(f"{directory} has no {path.name}, which {INDEX_NAME} names")
        hint = "; PyTorch .bin weights are not read" if any(directory.glob("*.bin")) else ""
        raise CheckpointError(f"{directory} has no {SINGLE_NAME} and no {INDEX_NAME}{hint}")
    return paths


def _is_of_gguf(directory: Path) -> bool:
    """Whether its weights are in GGUF files elsewhere. safetensors files in it come first."""
    has_others = (directory / SINGLE_NAME).is_file() or (directory / INDEX_NAME).exists()
    return not has_others and (directory / POINTER_NAME).is_file()


def check_weight_sizes(files: Sequence[Path], info: ModelInfo) -> None:
    """Raises CheckpointError if a header is malformed, a file is cut off, or config.json and the tensors differ in a
    size that decides how much memory the model takes.

    info: see fit_to_tensors. Compares embedding, LM head and the first layer, and that every layer
    exists. Other tensors are compared when they are loaded. Takes about a millisecond.
    """
    check_tensor_sizes(read_tensors(files, info.quantization), info)


def check_tensor_sizes(tensors: Mapping[str, StoredTensor], info: ModelInfo) -> None:
    """Compare the sizes in config.json with these tensors, as check_weight_sizes does; those of a model that
    transformers' class computes are compared when they are loaded. Raises CheckpointError."""
    if not info.is_native:
        return
    stored, layers = FAMILIES[info.family].stored, info.spec.layers
    vocab_shape = (info.vocab_size, info.hidden_size)
    expected = {info.embedding_tensor: vocab_shape}
    kinds = {(type(layer.state), type(layer.mlp)): index for index, layer in reversed(list(enumerate(layers)))}
    for layer in sorted(kinds.values()):
        sizes = layers[layer].output_sizes
        compared = {"self_attn.q_proj", "self_attn.k_proj", _first_of_mlp(layers[layer])}
        for module in (name for name in sizes if name in compared or name.startswith("state.")):
            name, _ = stored.place(module)
            size = sum(sizes[part] for part in stored.fused.get(name, (module,)))
            expected[f"model.layers.{layer}.{name}.weight"] = (size, info.hidden_size)
    if not info.tie_embeddings:
        expected[HEAD] = vocab_shape
    for name, shape in expected.items():
        if name not in tensors:
            why = f", which only tie_word_embeddings replaces by {EMBEDDING}" if name == HEAD else ""
            raise CheckpointError(f"the checkpoint lacks tensor {name}{why}")
        if tensors[name].shape != shape:
            raise CheckpointError(f"tensor {name} has shape {tensors[name].shape}, but config.json makes it {shape}")
    for index, layer_spec in enumerate(layers):
        name = f"model.layers.{index}.{stored.place(_first_of_mlp(layer_spec))[0]}.weight"
        if name not in tensors:
            raise CheckpointError(f"the checkpoint lacks tensor {name}: config.json has {info.num_layers} layers")
        if isinstance(mlp := layer_spec.mlp, ExpertsSpec) and not info.stacks_experts:
            count = mlp.router.num_experts
            name = f"model.layers.{index}.{stored.name(f'mlp.experts.{count - 1}.down_proj')}.weight"
            if name not in tensors:
                raise CheckpointError(f"the checkpoint lacks tensor {name}: config.json has {count} experts")


def _first_of_mlp(layer: LayerSpec) -> str:
    """The module by which a layer is known to be stored: of its feed-forward, if it has one."""
    modules = ROUTER, "mlp.gate_proj", "mlp.up_proj", *layer.output_sizes
    return next(name for name in modules if name in layer.output_sizes)


def is_old_buffer(name: str) -> bool:
    """Whether a tensor is a buffer that old versions of transformers stored and that every version computes anew:
    rotary frequencies and tables, and the number that a mask was filled with."""
    return name.rpartition(".")[2] in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached", "masked_bias")


def read_tensors(files: Sequence[Path], quantization: Quantization | None = None) -> dict[str, StoredTensor]:
    """Name in Hugging Face format -> every tensor in the files; each quantised weight is one tensor. Raises
    CheckpointError if a header is not valid, or the parts of a quantised weight do not fit together.

    files: all of a model's, if they are GGUF files or have quantised weights. quantization: of safetensors files."""
    if is_gguf(files[0]):
        return read_model(files).tensors
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            found = _read_header(file)
        except (OSError, ValueError) as error:
            raise unreadable(file, "safetensors", error) from None
        if twice := sorted(tensors.keys() & found.keys()):
            raise CheckpointError(f"tensor {twice[0]} is in the checkpoint twice, the second time in {file.name}")
        tensors |= found
    tensors = _of_text(tensors)
    return tensors if quantization is None else join_tensors(tensors, quantization)


def _of_text(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """All tensors; of a checkpoint with a model for images, those of its text model, by the names of one without. Those
    of a model without LM head have their names in one with it."""
    if any(map(_OF_BARE_MODEL.match, tensors)):
        return {
            f"model.{name}" if _OF_BARE_MODEL.match(name) else name: replace(tensor, name_in_file=name)
            for name, tensor in tensors.items()
        }
    if not any(name.startswith(tuple(TEXT_PREFIXES)) for name in tensors):
        return tensors
    found = {}
    for name, tensor in tensors.items():
        for prefix, short in {**TEXT_PREFIXES, "lm_head.": "lm_head."}.items():
            if name.startswith(prefix):
                found[short + name.removeprefix(prefix)] = replace(tensor, name_in_file=name)
                break
    return found


def write_header(output: BinaryIO, tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> None:
    """Begin a safetensors file, whose tensors follow in the same order: name, dtype, shape and bytes of each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)
    output.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Raises OSError and ValueError."""
    with path.open("rb") as file:
        return parse_header(path, file)


def parse_header(path: Path, file: BinaryIO) -> dict[str, StoredTensor]:
    """Every tensor by its name. file: the content of `path`. Raises OSError and ValueError."""
    size = file.seek(0, 2)
    file.seek(0)
    header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or header_bytes > min(size - _LENGTH_BYTES, MAX_HEADER_BYTES):
        raise ValueError(f"its header is malformed or cut off (the file has {size:,} bytes)")
    header = parse_json(file.read(header_bytes))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    data_start = _LENGTH_BYTES + header_bytes
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: _parse_entry(path, name, entry, data_start, size - data_start) for name, entry in entries.items()}


def _parse_entry(file: Path, name: str, entry: object, data_start: int, data_bytes: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of tensor {name} is not an object")
    shape, offsets, dtype = entry.get("shape"), entry.get("data_offsets"), entry.get("dtype")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or not isinstance(dtype, str):
        raise ValueError(f"the shape, dtype or data_offsets of tensor {name} are malformed")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise ValueError(f"tensor {name} ends after the end of the file, which may be cut off")
    if dtype in _ITEM_BYTES and prod(shape) * _ITEM_BYTES[dtype] != end - begin:
        raise ValueError(f"tensor {name} has {end - begin:,} bytes, which do not match its shape and dtype")
    return StoredTensor(file, dtype, tuple(shape), data_start + begin, data_start + end)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    """Whether it is a short list of integers from 0 to 2**63."""
    if not isinstance(value, list) or len(value) > 8:
        return False
    return all(type(each) is int and 0 <= each < 1 << 63 for each in value)


def stacks_experts(info: ModelInfo, names: Iterable[str]) -> bool | None:
    """Whether tensors of these names are of a layer's experts together, as in StoredTensors.stack. None if none are of
    experts."""
    stack = FAMILIES[info.family].stored.stack
    names = list(names)
    if stack is not None and any(name.endswith((f".{stack.gate_up}", f".{stack.down}")) for name in names):
        return True
    return False if any(map(_OF_AN_EXPERT.search, names)) else None


def _expert_block(info: ModelInfo, tensors: Mapping[str, StoredTensor]) -> int:
    """As of ModelInfo."""
    stored, sizes = FAMILIES[info.family].stored, {1}
    name = f"{stored.name('mlp.experts.0.down_proj')}.weight"
    if info.stacks_experts and stored.stack is not None:
        name = stored.stack.down
    for index, layer in enumerate(info.spec.layers):
        tensor = tensors.get(f"model.layers.{index}.{name}")
        if isinstance(tensor, QuantizedTensor) and isinstance(layer.mlp, ExpertsSpec) and tensor.num_groups > 1:
            sizes.add(layer.mlp.expert.width // tensor.num_groups)
        elif tensor is not None and tensor.dtype in TYPES:
            sizes.add(TYPES[tensor.dtype].block_elements)
    return lcm(*sizes)


def fit_to_tensors(
    info: ModelInfo, files: Sequence[Path], on_phase: Callable[[str], None] = lambda _: None
) -> ModelInfo:
    """`info` of config.json, with what the tensors in `files` decide: whether and from which of them the embeddings are
    tied.

    on_phase: called before a comparison that may read both matrices. Raises CheckpointError if a header is malformed
    or the tensors do not have the sizes in config.json (see check_weight_sizes).
    """
    tensors = read_tensors(files, info.quantization)
    if not info.is_native:
        return info
    info = replace(info, stacks_experts=bool(stacks_experts(info, tensors)))
    info = replace(info, expert_block=_expert_block(info, tensors))
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    if info.pooling is not None:
        info = replace(info, pooling=fit_head(info.pooling, tensors, info.hidden_size))
    if info.tie_embeddings and head is not None and (info.pooling is None or info.pooling.uses_answers):
        if embedding is None:
            info = replace(info, embedding_tensor=HEAD)
        else:
            on_phase(f"comparing {HEAD} with the embedding")
            if not are_equal(embedding, head):
                logger.warning("%s differs from the embedding and is used, although tie_word_embeddings is true", HEAD)
                info = replace(info, tie_embeddings=False)
    check_tensor_sizes(tensors, info)
    renamed = [tensor.name_in_file for tensor in tensors.values() if tensor.name_in_file]
    if renamed and not any(map(_OF_BARE_MODEL.match, renamed)):
        others = sum(len(_read_header(file)) for file in files) - len(tensors)
        logger.warning("%d tensors of other parts than the text model are passed over", others)
    if buffers := [name for name in tensors if is_old_buffer(name)]:
        logger.warning("buffers of an old checkpoint are passed over: %d, such as %s", len(buffers), buffers[0])
    return info


def are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether both have the same shape, dtype and bytes. Reads both up to the first difference."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    with first.file.open("rb") as first_file, second.file.open("rb") as second_file:
        first_file.seek(first.begin)
        second_file.seek(second.begin)
        left = first.end - first.begin
        while left > 0:
            chunk = first_file.read(min(left, _CHUNK_BYTES))
            if chunk != second_file.read(min(left, _CHUNK_BYTES)) or not chunk:
                return False
            left -= len(chunk)
    return True
