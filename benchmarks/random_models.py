"""Checkpoints with random weights in Llama's shapes, and a tokenizer with a token for each byte."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_BYTES = 256
EOS_ID = NUM_BYTES


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama model."""

    name: str
    vocab_size: int
    """At least NUM_BYTES + 1. Tokens that the tokenizer does not have are drawn all the same, and have no text."""
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_tied: bool
    """The embedding is also the LM head."""
    max_tokens: int = 8192
    """Longest sequence."""
    num_experts: int = 0
    """Of each layer, each an MLP of mlp_size; 0: layers have one MLP."""
    num_chosen: int = 1
    """Experts of a token."""


LLAMA_1B = ModelShape("Llama-3.2-1B shape", 128_256, 2048, 8192, 16, 32, 8, 64, is_tied=True)
LLAMA_8B = ModelShape("Llama-3.1-8B shape", 128_256, 4096, 14_336, 32, 32, 8, 128, is_tied=False)
TINY = ModelShape("tiny shape", 512, 64, 96, 2, 4, 2, 16, is_tied=True)


def write_model(directory: Path, shape: ModelShape) -> None:
    """Write a checkpoint in bfloat16, in Hugging Face format: one file for each layer, and one for the rest.

    All layers have the same weights, which costs less time to make and changes nothing in the time that a step takes.
    Raises OSError."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)

    def matrix(num_rows: int, num_columns: int) -> torch.Tensor:
        return torch.empty((num_rows, num_columns), dtype=torch.bfloat16).normal_(0, 0.02)

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden_size, dtype=torch.bfloat16)

    query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = {
        "input_layernorm.weight": ones(),
        "post_attention_layernorm.weight": ones(),
        "self_attn.q_proj.weight": matrix(query_size, shape.hidden_size),
        "self_attn.k_proj.weight": matrix(kv_size, shape.hidden_size),
        "self_attn.v_proj.weight": matrix(kv_size, shape.hidden_size),
        "self_attn.o_proj.weight": matrix(shape.hidden_size, query_size),
        "mlp.gate_proj.weight": matrix(shape.mlp_size, shape.hidden_size),
        "mlp.up_proj.weight": matrix(shape.mlp_size, shape.hidden_size),
        "mlp.down_proj.weight": matrix(shape.hidden_size, shape.mlp_size),
    }
    rest = {"model.embed_tokens.weight": matrix(shape.vocab_size, shape.hidden_size), "model.norm.weight": ones()}
    if not shape.is_tied:
        rest["lm_head.weight"] = matrix(shape.vocab_size, shape.hidden_size)
    files = [
        {f"model.layers.{index}.{name}": value for name, value in layer.items()} for index in range(shape.num_layers)
    ]
    file_of_weight: dict[str, str] = {}
    for number, weights in enumerate((*files, rest)):
        filename = f"model-{number:05}.safetensors"
        save_file(weights, directory / filename)
        file_of_weight |= dict.fromkeys(weights, filename)
    index = {"metadata": {}, "weight_map": file_of_weight}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    write_config(directory, shape)
    write_byte_tokenizer(directory)


def write_config(directory: Path, shape: ModelShape) -> None:
    """The model's config.json alone. Raises OSError."""
    (directory / "config.json").write_text(json.dumps(_config(shape)))


def write_byte_tokenizer(directory: Path) -> None:
    """Each byte of a text is a token. Raises OSError."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eos|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def num_bytes(shape: ModelShape) -> int:
    """Bytes of the checkpoint's weights."""
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * shape.hidden_size
    layer = attention + 3 * shape.mlp_size * shape.hidden_size
    num_embeddings = 1 if shape.is_tied else 2
    return 2 * (shape.num_layers * layer + num_embeddings * shape.vocab_size * shape.hidden_size)


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_tokens,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.is_tied,
        "eos_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
    }
