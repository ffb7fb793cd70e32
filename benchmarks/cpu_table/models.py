"""The models of the table: Llama's layers in five sizes, and Mixtral's in one, with random weights, as a checkpoint or
as a GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quant_shape_to_byte_shape
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from benchmarks.random_models import EOS_ID, LLAMA_1B, LLAMA_8B, ModelShape

SHAPES = {
    "135M": ModelShape("135M", 49_152, 576, 1536, 30, 9, 3, 64, is_tied=True),
    "0.6B": ModelShape("0.6B", 151_936, 1024, 3072, 28, 16, 8, 128, is_tied=True),
    "1B": LLAMA_1B,
    "4B": ModelShape("4B", 151_936, 2560, 9728, 36, 32, 8, 128, is_tied=True),
    "8B": LLAMA_8B,
    "experts": ModelShape(
        "1.7B, 0.3B active", 32_000, 1024, 512, 16, 16, 8, 64, is_tied=False, num_experts=64, num_chosen=8
    ),
}
"""The sizes of SmolLM2-135M, Qwen3-0.6B, Llama-3.2-1B, Qwen3-4B and Llama-3.1-8B; one with as many experts as OLMoE."""

_FILE_TYPES = {
    "bfloat16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
}
FORMATS = tuple(_FILE_TYPES)

_SUPER_BLOCK = 256
_DEVIATION = 0.02
"""Standard deviation of the weights."""

# Where the scales are in a block as it is stored, in 16-bit numbers, and what makes weights of _DEVIATION of random
# codes. Q4_K has a scale for its least values too, with which the weights' mean is 0.
_SCALES = {
    "Q8_0": {0: _DEVIATION / 74},
    "Q5_0": {0: _DEVIATION / 9.2},
    "Q4_K": {0: _DEVIATION / 258, 1: 7.5 * _DEVIATION / 258},
    "Q6_K": {104: _DEVIATION / 1365},
}


def num_matrix_weights(shape: ModelShape) -> int:
    """Weights that a token is multiplied by: the layers' matrices, of experts those chosen, and the LM head."""
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * shape.hidden_size
    router = shape.num_experts * shape.hidden_size
    layer = attention + router + 3 * shape.num_chosen * shape.mlp_size * shape.hidden_size
    return shape.num_layers * layer + shape.vocab_size * shape.hidden_size


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Of the matrices as they are stored."""

    of_all_tokens: int
    """By which every token is multiplied."""
    of_experts: int = 0

    def read_by(self, shape: ModelShape, num_rows: int) -> float:
        """Expected in a step of num_rows tokens, whose experts are drawn evenly."""
        if not shape.num_experts:
            return self.of_all_tokens
        unread = (1 - shape.num_chosen / shape.num_experts) ** num_rows
        return self.of_all_tokens + self.of_experts * (1 - unread)


def write_gguf(path: Path, shape: ModelShape, kind: str) -> WeightBytes:
    """Writes the model with the types that llama.cpp's quantiser gives a file of this kind (one of FORMATS).

    All layers have the same random blocks. Raises OSError."""
    writer = GGUFWriter(path, "llama")
    _add_metadata(writer, shape)
    writer.add_file_type(_FILE_TYPES[kind])
    random = np.random.default_rng(0)
    made: dict[tuple[str, int, int], NDArray[np.uint8]] = {}
    num_bytes = num_expert_bytes = 0

    def add(name: str, stored: str, rows: int, columns: int, is_multiplied: bool = True) -> None:
        nonlocal num_bytes
        writer.add_tensor(f"{name}.weight", blocks(stored, rows, columns), raw_dtype=GGMLQuantizationType[stored])
        num_bytes += blocks(stored, rows, columns).nbytes if is_multiplied else 0

    def add_experts(name: str, stored: str, rows: int, columns: int) -> None:
        nonlocal num_expert_bytes
        own = blocks(stored, shape.num_experts * rows, columns).reshape(shape.num_experts, rows, -1)
        writer.add_tensor(f"{name}_exps.weight", own, raw_dtype=GGMLQuantizationType[stored])
        num_expert_bytes += own.nbytes

    def blocks(*key: Any) -> NDArray[np.uint8]:
        if key not in made:
            made[key] = _random_blocks(random, *key)
        return made[key]

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(shape.hidden_size, np.float32))

    hidden, mlp = shape.hidden_size, shape.mlp_size
    query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    vocabulary = (shape.vocab_size, hidden)
    add(
        "token_embd",
        _stored_type(kind, hidden, has_more_bits=shape.is_tied),
        *vocabulary,
        is_multiplied=shape.is_tied,
    )
    if not shape.is_tied:
        add("output", _stored_type(kind, hidden, has_more_bits=True), *vocabulary)
    add_norm("output_norm")
    for layer in range(shape.num_layers):
        has_more_bits = _has_more_bits(layer, shape.num_layers)
        for name, rows, columns, may_have_more in (
            ("attn_q", query_size, hidden, False),
            ("attn_k", kv_size, hidden, False),
            ("attn_v", kv_size, hidden, True),
            ("attn_output", hidden, query_size, False),
            ("ffn_gate", mlp, hidden, False),
            ("ffn_up", mlp, hidden, False),
            ("ffn_down", hidden, mlp, True),
        ):
            stored = _stored_type(kind, columns, has_more_bits and may_have_more)
            add_one = add_experts if shape.num_experts and name.startswith("ffn") else add
            add_one(f"blk.{layer}.{name}", stored, rows, columns)
        if shape.num_experts:
            router = random.standard_normal((shape.num_experts, hidden), np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
            num_bytes += router.nbytes
        add_norm(f"blk.{layer}.attn_norm")
        add_norm(f"blk.{layer}.ffn_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return WeightBytes(num_bytes, num_expert_bytes)


def _stored_type(kind: str, columns: int, has_more_bits: bool) -> str:
    if kind != "Q4_K_M":
        return {"bfloat16": "BF16"}.get(kind, kind)
    if columns % _SUPER_BLOCK:  # rows that no super block divides
        return "Q8_0" if has_more_bits else "Q5_0"
    return "Q6_K" if has_more_bits else "Q4_K"


def _has_more_bits(layer: int, num_layers: int) -> bool:
    """Whether Q4_K_M stores this layer's values and its MLP's last matrix with more bits."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _random_blocks(random: np.random.Generator, stored: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """[rows, bytes of a row]."""
    if stored == "BF16":
        values = random.standard_normal((rows, columns), np.float32) * np.float32(_DEVIATION)
        return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    kind = GGMLQuantizationType[stored]
    row_bytes = quant_shape_to_byte_shape((rows, columns), kind)[-1]
    block_bytes = quant_shape_to_byte_shape((rows, _SUPER_BLOCK if "K" in stored else 32), kind)[-1]
    blocks = random.integers(0, 256, (rows, row_bytes // block_bytes, block_bytes), np.uint8)
    for position, scale in _SCALES[stored].items():
        blocks.view(np.float16)[..., position] = scale
    return blocks.reshape(rows, row_bytes)


def _add_metadata(writer: GGUFWriter, shape: ModelShape) -> None:
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_tokens)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.mlp_size)
    if shape.num_experts:
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.num_chosen)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab_size)
    # One token for each byte, as in the checkpoint; formats without merges do not exist, so two letters have one.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<|eos|>", "ab"]
    tokens += [f"<|unused {number}|>" for number in range(shape.vocab_size - len(tokens))]
    types = [TokenType.NORMAL] * len(alphabet) + [TokenType.CONTROL, TokenType.NORMAL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types + [TokenType.UNUSED] * (shape.vocab_size - len(types)))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(EOS_ID)
    writer.add_bos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
