"""Small GGUF files, written as llama.cpp's converter writes them, from random weights in Hugging Face order."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.float32]]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, LAYERS = 64, 4, 2, 16, 96, 80, 2

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def random_weights(family: str, tied: bool, seed: int = 0) -> Arrays:
    """Every tensor of a tiny model by its Hugging Face name, float32."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
        for letter, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{prefix}self_attn.{letter}_proj.weight"] = (heads * HEAD_DIM, HIDDEN)
            if family == "qwen2":
                shapes[f"{prefix}self_attn.{letter}_proj.bias"] = (heads * HEAD_DIM,)
            if family == "qwen3" and letter != "v":
                shapes[f"{prefix}self_attn.{letter}_norm.weight"] = (HEAD_DIM,)
        shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[prefix + "mlp.gate_proj.weight"] = shapes[prefix + "mlp.up_proj.weight"] = (MLP, HIDDEN)
        shapes[prefix + "mlp.down_proj.weight"] = (HIDDEN, MLP)
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}"


def interleave_rows(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """llama.cpp's order of Llama's q and k: in each head, row i and row i + half become neighbours."""
    rows = []
    for head in matrix.reshape(-1, HEAD_DIM, matrix.shape[1]):
        for i in range(HEAD_DIM // 2):
            rows += [head[i], head[i + HEAD_DIM // 2]]
    return np.stack(rows)


def write_gguf(
    path: Path,
    family: str,
    weights: Arrays,
    kind: GGMLQuantizationType,
    fields: dict[str, Any] | None = None,
    rope_factors: NDArray[np.float32] | None = None,
    tokenizer: dict[str, Any] | None = None,
    tensors_of_part: int = 0,
) -> None:
    """kind: type of matrices; vectors are float32. fields, tokenizer: overrides of metadata; None omits a key.

    tensors_of_part: if not 0, a model in parts with so many tensors each: path-00001-of-0000N.gguf and so on."""
    writer = GGUFWriter(path, family, split_max_tensors=tensors_of_part)
    metadata = {
        f"{family}.block_count": LAYERS,
        f"{family}.context_length": 256,
        f"{family}.embedding_length": HIDDEN,
        f"{family}.feed_forward_length": MLP,
        f"{family}.attention.head_count": HEADS,
        f"{family}.attention.head_count_kv": KV_HEADS,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{family}.rope.freq_base": 500000.0,
        **byte_tokenizer(),
        **(tokenizer or {}),
        **(fields or {}),
    }
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    for name, array in weights.items():
        permuted = family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight"))
        stored = interleave_rows(array) if permuted else array
        if array.ndim == 1:
            writer.add_tensor(gguf_name(name), stored)
        else:
            writer.add_tensor(gguf_name(name), quantize(stored, kind), raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_tokenizer() -> dict[str, Any]:
    """Metadata of a tokenizer with few tokens: enough to be accepted."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<|end|>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }
