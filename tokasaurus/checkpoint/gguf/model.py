"""The tensors of a GGUF model under their names in Hugging Face format, from one file or several parts."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokasaurus.checkpoint.families import FAMILIES, Family
from tokasaurus.checkpoint.gguf.header import Header, TensorEntry, read_header
from tokasaurus.checkpoint.json_files import CheckpointError, unreadable
from tokasaurus.checkpoint.spec import ROUTER
from tokasaurus.checkpoint.stored_tensors import StoredTensor

SUFFIX = ".gguf"
ARCHITECTURES: dict[str, list[str]] = {}
"""The families, by model_type in config.json, of each architecture that is read."""
for _name, _family in FAMILIES.items():
    if _family.gguf is not None:
        ARCHITECTURES.setdefault(_family.gguf.architecture, []).append(_name)

# The table of the gguf library goes the other way, from up to a dozen spellings of a tensor in checkpoints to its name
# in a file. So it cannot say which spelling our models have; a test compares these names with it.
_TOP_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "attention_out_norm",
    "post_ffw_norm": "mlp_out_norm",
    "ffn_gate_inp": ROUTER,
    "exp_probs_b": "mlp.choice",
    **{f"ffn_{name}_exps": f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")},
    **{f"ffn_{name}_shexp": f"mlp.shared.{name}_proj" for name in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_gate",
}
"""Modules that every family may have, by their names in `families`."""
_KINDS = {"attn_sinks": "sinks", "exp_probs_b": "e_score_correction_bias"}
"""Kinds of these tensors, where that is not "weight" or "bias"."""
_IN_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")
_FUSED = "self_attn.qkv_proj"
_PERMUTED = ("self_attn.q_proj", "self_attn.k_proj")
NOT_WEIGHTS = ("Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64", "F64")
"""Types of intermediate results and of tables, and types that the gguf library cannot dequantise."""
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Multipliers of the rotary wavelengths, which Hugging Face format has in config.json."""

_PART_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
_MAX_PARTS = 1000

_KEYS_OF_TENSORS = (
    *("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("expert_count", "nextn_predict_layers", "attention.sliding_window"),
)
"""Keys of the metadata, which follow the architecture's name and a dot."""


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """A model's files, as their headers describe them."""

    architecture: str
    metadata: dict[str, Any]
    """Metadata of the first file."""
    tensors: dict[str, StoredTensor]
    """The tensors by their names in Hugging Face format, in the files' order."""
    rope_factors: dict[str, StoredTensor]
    """The tensors named in ROPE_FACTORS, if the files have them."""


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX


def model_name(path: Path) -> str:
    """The file's name without its ending, and without the number of a part."""
    part = _PART_NAME.fullmatch(path.name)
    return path.stem if part is None else part[1]


def files_of_model(path: Path) -> list[Path]:
    """`path`, or all parts of the model if it is named as the first part. Raises CheckpointError if one is missing."""
    part = _PART_NAME.fullmatch(path.name)
    if part is None:
        files = [path]
    else:
        name, number, count = part[1], int(part[2]), int(part[3])
        if not 1 <= number <= count <= _MAX_PARTS:
            raise CheckpointError(f"{path} is named as part {number} of {count}; a model has up to {_MAX_PARTS} parts")
        files = [path.with_name(f"{name}-{each:05}-of-{count:05}{SUFFIX}") for each in range(1, count + 1)]
        if number != 1:
            raise CheckpointError(
                f"{path} is part {number} of {count} of a model; name its first part, {files[0].name}"
            )
    for number, file in enumerate(files, start=1):
        if not file.is_file():
            which = "" if len(files) == 1 else f", part {number} of {len(files)} of the model"
            raise CheckpointError(f"there is no file {file}{which}")
    return files


def read_model(files: Sequence[Path], wanted: Callable[[str], bool] | None = None) -> GGUFModel:
    """files: all parts. wanted: which keys of the metadata to read; None: the keys that say what the tensors are.

    Raises CheckpointError if a file is malformed or cut off, or a tensor does not belong in the model."""
    headers: list[Header] = []
    for file in files:
        try:
            headers.append(read_header(file, _says_what_tensors_are if wanted is None else wanted))
        except (OSError, ValueError) as error:
            raise unreadable(file, "GGUF", error) from None
    metadata = headers[0].fields
    try:
        _check_parts(headers)
        if metadata.get("general.type") == "adapter":
            raise CheckpointError("it is an adapter, not a model: merge it into its base model")
        architecture = _architecture_of(metadata)
        num_layers = metadata.get(f"{architecture}.block_count")
        if type(num_layers) is not int:
            raise CheckpointError(f"{architecture}.block_count is missing")
        head_size = _head_size(architecture, metadata)
        own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
        family = FAMILIES[family_of(architecture, own)]
        num_drafting = num_draft_layers(family, own)
        tensors: dict[str, StoredTensor] = {}
        rope_factors: dict[str, StoredTensor] = {}
        for file, header in zip(files, headers, strict=True):
            for entry in header.tensors:
                if entry.name in ROPE_FACTORS:
                    rope_factors[entry.name] = _stored(file, entry)
                    continue
                place = _place(family, num_layers, entry.name)
                if num_drafting and entry.name.startswith(_beginnings(num_layers, num_drafting)):
                    continue
                if place is None:
                    raise CheckpointError(f"tensor {entry.name} does not belong in a {architecture} model")
                prefix, module, kind = place
                name = f"{prefix}{family.stored.name(module)}.{kind}"
                if name in tensors:
                    raise CheckpointError(f"tensor {entry.name} is in {tensors[name].file.name} and {file.name}")
                if entry.type_name in NOT_WEIGHTS:
                    raise CheckpointError(f"tensor {entry.name} has type {entry.type_name}, which is not supported")
                added = float(family.stored.adds_one and kind == "weight" and module.endswith("norm"))
                if added and entry.type_name != "F32":
                    raise CheckpointError(f"tensor {entry.name} has type {entry.type_name}, not F32")
                is_interleaved = family.gguf is not None and family.gguf.is_permuted and module in _PERMUTED
                if is_interleaved and (head_size < 1 or entry.shape[0] % head_size or head_size % 2):
                    raise CheckpointError(f"tensor {entry.name} has {entry.shape[0]} rows, but heads have {head_size}")
                stored = _stored(file, entry, head_size if is_interleaved else 0, added)
                if "*" in module:
                    tensors.update(_of_experts(stored, entry.name, f"{prefix}{{}}.{kind}", family, module))
                elif len(entry.shape) == 1 and module in _rows_in_checkpoint(family):
                    tensors[name] = replace(stored, shape=(1, *entry.shape))
                elif module == _FUSED and _FUSED not in family.stored.fused:
                    sizes = _rows_of_heads(architecture, metadata, head_size)
                    tensors.update(_split(stored, f"{prefix}self_attn", kind, sizes))
                else:
                    tensors[name] = stored
    except CheckpointError as error:
        raise CheckpointError(f"{files[0]}: {error}") from None
    return GGUFModel(architecture, metadata, tensors, rope_factors)


def _stored(file: Path, entry: TensorEntry, interleaved_head: int = 0, added: float = 0.0) -> StoredTensor:
    return StoredTensor(file, entry.type_name, entry.shape, entry.begin, entry.end, interleaved_head, added=added)


def family_of(architecture: str, fields: Mapping[str, Any]) -> str:
    """The family by its model_type. fields: the metadata of the architecture, without its name."""
    found = {key for key, value in fields.items() if value}
    possible = [name for name in ARCHITECTURES[architecture] if found.issuperset(_needed(FAMILIES[name]))]
    return possible[-1]


def _needed(family: Family) -> tuple[str, ...]:
    assert family.gguf is not None
    return family.gguf.needed


def num_draft_layers(family: Family, fields: Mapping[str, Any]) -> int:
    """How many of the last layers draft tokens, and are not read. fields: as of family_of; block_count is a number.

    Raises CheckpointError."""
    value = fields.get("nextn_predict_layers", 0) if family.stored.has_draft_layers else 0
    count = fields["block_count"]
    if type(value) is not int or (value != 0 and not 0 < value < count):
        assert family.gguf is not None
        key = f"{family.gguf.architecture}.nextn_predict_layers"
        raise CheckpointError(f"{key} is {value}, but there are {count} layers, and not all may draft tokens")
    return value


def _beginnings(num_layers: int, num_drafting: int) -> tuple[str, ...]:
    """Of the names of tensors in the last layers."""
    return tuple(f"blk.{index}." for index in range(num_layers - num_drafting, num_layers))


def _rows_in_checkpoint(family: Family) -> list[str]:
    """Modules whose tensors are matrices of one row in checkpoints, and vectors here."""
    return ["mlp.shared_gate", *(["mlp.choice"] if family.stored.has_choice_bias_row else [])]


def _of_experts(
    stored: StoredTensor, name_in_file: str, name: str, family: Family, module: str
) -> dict[str, StoredTensor]:
    """The tensors of each expert that one has. name: with a place for the module's."""
    if len(stored.shape) < 2:
        raise CheckpointError(f"tensor {name_in_file} has shape {stored.shape}, without a dimension of experts")
    num_experts, *shape = stored.shape
    size = (stored.end - stored.begin) // num_experts
    return {
        name.format(family.stored.name(module.replace("*", str(index)))): replace(
            stored, shape=tuple(shape), begin=stored.begin + index * size, end=stored.begin + (index + 1) * size
        )
        for index in range(num_experts)
    }


def _rows_of_heads(architecture: str, metadata: dict[str, Any], head_size: int) -> dict[str, int]:
    """Rows of queries, keys and values."""
    num_heads = metadata.get(f"{architecture}.attention.head_count")
    num_kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", num_heads)
    if type(num_heads) is not int or type(num_kv_heads) is not int:
        raise CheckpointError(f"{architecture}.attention.head_count or head_count_kv is not a number")
    return {"q_proj": num_heads * head_size, "k_proj": num_kv_heads * head_size, "v_proj": num_kv_heads * head_size}


def _split(stored: StoredTensor, prefix: str, kind: str, rows: dict[str, int]) -> dict[str, StoredTensor]:
    """The tensors that one has, one after another. rows: of each, by its name."""
    if sum(rows.values()) != stored.shape[0]:
        raise CheckpointError(f"a tensor of queries, keys and values has {stored.shape[0]} rows, not {rows}")
    row_bytes, begin, parts = (stored.end - stored.begin) // stored.shape[0], stored.begin, {}
    for name, count in rows.items():
        end = begin + count * row_bytes
        parts[f"{prefix}.{name}.{kind}"] = replace(stored, shape=(count, *stored.shape[1:]), begin=begin, end=end)
        begin = end
    return parts


def _says_what_tensors_are(key: str) -> bool:
    return key in ("general.architecture", "general.type") or key.startswith("split.") or key.endswith(_KEYS_OF_TENSORS)


def _check_parts(headers: Sequence[Header]) -> None:
    """Raises CheckpointError unless they are all parts of one model, in order."""
    counts = (0, 1) if len(headers) == 1 else (len(headers),)
    for index, header in enumerate(headers):
        count, number = header.fields.get("split.count", 0), header.fields.get("split.no", index)
        if count not in counts or number != index:
            said = f"split.no is {number} and split.count {count}"
            where = f"file {index + 1} of {len(headers)}"
            raise CheckpointError(f"in {where}, {said}; files are named as parts: name-00001-of-00003{SUFFIX}")
    stated, found = headers[0].fields.get("split.tensors.count"), sum(len(header.tensors) for header in headers)
    if stated is not None and stated != found:
        raise CheckpointError(f"the model has {found} tensors, but split.tensors.count is {stated}")


def _architecture_of(metadata: dict[str, Any]) -> str:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"architecture {architecture!r} is not supported; supported are {supported}")
    return architecture


def _head_size(architecture: str, metadata: dict[str, Any]) -> int:
    head_size = metadata.get(f"{architecture}.attention.key_length")
    if type(head_size) is int and head_size > 0:
        return head_size
    hidden_size = metadata.get(f"{architecture}.embedding_length")
    num_heads = metadata.get(f"{architecture}.attention.head_count")
    if type(hidden_size) is not int or type(num_heads) is not int or num_heads < 1:
        raise CheckpointError(f"{architecture}.embedding_length or {architecture}.attention.head_count is missing")
    return hidden_size // num_heads


def _place(family: Family, num_layers: int, name: str) -> tuple[str, str, str] | None:
    """Prefix of the layer, module as of Llama's checkpoints, and "weight" or "bias"; None if no model has such a
    tensor. A module that the family has not is found when the weights are loaded."""
    assert family.gguf is not None
    path, _, kind = name.rpartition(".")
    in_layer = _IN_LAYER.fullmatch(path)
    found = _TOP_MODULES.get(path) if in_layer is None else None
    prefix = ""
    if in_layer is not None and int(in_layer[1]) < num_layers:
        prefix = f"model.layers.{in_layer[1]}."
        found = {**_LAYER_MODULES, **family.gguf.modules}.get(in_layer[2])
        fused = [each for each, parts in family.stored.fused.items() if found in parts and each.startswith("mlp.")]
        found = fused[0] if fused else found  # the first part has the place of the fused tensor
    if found is None or kind not in ("weight", "bias"):
        return None
    return prefix, found, kind if in_layer is None else _KINDS.get(in_layer[2], kind)
