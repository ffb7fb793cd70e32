"""Writes the model in each format as a GGUF file, and what each file means in float32."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from numpy.typing import NDArray

# L layers, E hidden size, F intermediate size, H query heads, K key/value heads, D head size

Weights = dict[str, NDArray[np.float32]]
"""By the tensor's name in GGUF. Of a matrix: [outputs, inputs]."""

LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
EMBEDDING = "token_embd.weight"
INT4_GROUP = 64


def read_weights(path: Path) -> Weights:
    """All tensors of a GGUF file, dequantised by the gguf package."""
    return {
        tensor.name: np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        for tensor in GGUFReader(path).tensors
    }


def read_metadata(path: Path) -> dict[str, Any]:
    """What the file says of its model beside the tensors: each key's field of GGUFReader."""
    return {name: field for name, field in GGUFReader(path).fields.items() if not name.startswith("GGUF.")}


def stored_types(path: Path) -> dict[str, int]:
    """Bytes of the matrices of each type."""
    found: dict[str, int] = {}
    for tensor in GGUFReader(path).tensors:
        if len(tensor.shape) == 2:
            found[tensor.tensor_type.name] = found.get(tensor.tensor_type.name, 0) + int(tensor.n_bytes)
    return found


def shuffle_channels(weights: Weights, metadata: Mapping[str, Any], seed: int) -> Weights:
    """The same function of tokens, with channels in a random order: hidden, intermediate, and of each value head.

    The source's weights come from blocks of 4 bits, and equal blocks would hold them again without a loss. With the
    channels in another order, the weights of a block come from many of the source's blocks."""
    random = np.random.default_rng(seed)
    num_layers, hidden, intermediate, num_heads, num_kv_heads = (
        int(metadata[f"llama.{name}"].contents())
        for name in (
            *("block_count", "embedding_length", "feed_forward_length"),
            *("attention.head_count", "attention.head_count_kv"),
        )
    )
    of_hidden = random.permutation(hidden)
    shuffled = {EMBEDDING: weights[EMBEDDING][:, of_hidden]}
    shuffled["output_norm.weight"] = weights["output_norm.weight"][of_hidden]
    for layer in range(num_layers):
        own = {name: weights[f"blk.{layer}.{name}.weight"] for name in (*LINEAR, "attn_norm", "ffn_norm")}
        for name in ("attn_norm", "ffn_norm"):
            own[name] = own[name][of_hidden]  # [E]
        for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
            own[name] = own[name][:, of_hidden]  # [outputs, E]
        for name in ("attn_output", "ffn_down"):
            own[name] = own[name][of_hidden]  # [E, inputs]
        of_head = random.permutation(hidden // num_heads)
        own["attn_v"] = own["attn_v"].reshape(num_kv_heads, -1, hidden)[:, of_head].reshape(-1, hidden)  # [K * D, E]
        by_head = own["attn_output"].reshape(hidden, num_heads, -1)
        own["attn_output"] = by_head[:, :, of_head].reshape(hidden, -1)  # [E, H * D]
        of_intermediate = random.permutation(intermediate)
        own["ffn_gate"], own["ffn_up"] = own["ffn_gate"][of_intermediate], own["ffn_up"][of_intermediate]  # [F, E]
        own["ffn_down"] = own["ffn_down"][:, of_intermediate]  # [E, F]
        shuffled |= {f"blk.{layer}.{name}.weight": np.ascontiguousarray(own[name]) for name in own}
    assert shuffled.keys() == weights.keys(), shuffled.keys() ^ weights.keys()
    return shuffled


def write_model(path: Path, weights: Weights, metadata: Mapping[str, Any], kind: str = "F32") -> None:
    """kind: type of the linear layers' blocks. The embedding, which is the LM head too, is then Q8_0, as llama.cpp's
    quantiser makes it for rows of this length, and norms are F32."""
    writer = GGUFWriter(path, "llama")
    for name, field in metadata.items():
        if name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for name, values in weights.items():
        stored = "F32" if values.ndim == 1 or kind == "F32" else "Q8_0" if name == EMBEDDING else kind
        kind_of_tensor = GGMLQuantizationType[stored]
        data = values if stored == "F32" else gguf.quantize(values, kind_of_tensor)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind_of_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def round_to_int8(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest weights of quantization=int8, as docs/cpu_engine.md describes them: a scale for each output."""
    scales = np.abs(rows).max(1, keepdims=True) / np.float32(127)
    rounded: NDArray[np.float32] = np.rint(rows / scales) * scales
    return rounded


def round_to_int4(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest weights of quantization=int4: a scale and a least value for each group of 64 inputs."""
    groups = rows.reshape(len(rows), -1, INT4_GROUP)
    least = groups.min(2, keepdims=True)
    scales = (groups.max(2, keepdims=True) - least) / np.float32(15)
    rounded: NDArray[np.float32] = np.rint((groups - least) / scales) * scales + least
    return rounded.reshape(rows.shape)


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """To the nearest, of two equally near ones to the even one. Finite values only."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def with_linear_layers(weights: Weights, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Weights:
    return {
        name: change(values) if any(f".{linear}." in name for linear in LINEAR) else values
        for name, values in weights.items()
    }
