"""Checkpoints of published shapes, whose weight files have headers and holes in place of data."""

import json
from pathlib import Path
from typing import Any

COMMON = {
    "max_position_embeddings": 131_072,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LLAMA = {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
QWEN = {**COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6}


def shape(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": LLAMA | shape(32, 4096, 32, 8, 14_336, 128_256) | {"rope_theta": 500_000.0},
    "Llama-3.1-70B": LLAMA | shape(80, 8192, 64, 8, 28_672, 128_256) | {"rope_theta": 500_000.0},
    "Qwen2.5-7B": QWEN | shape(28, 3584, 28, 4, 18_944, 152_064) | {"rope_theta": 1_000_000.0},
}


def tensors_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the published checkpoint's tensors, by name."""
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = hidden
    kv = config["num_key_value_heads"] * (hidden // config["num_attention_heads"])
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        sizes = {"q": query, "k": kv, "v": kv}
        for name, size in sizes.items():
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = (size, hidden)
            if config["model_type"] == "qwen2":
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
        tensors[f"{prefix}self_attn.o_proj.weight"] = (hidden, query)
        tensors[f"{prefix}mlp.gate_proj.weight"] = tensors[f"{prefix}mlp.up_proj.weight"] = (mlp, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = (hidden, mlp)
        tensors[f"{prefix}input_layernorm.weight"] = tensors[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    return tensors


def save(directory: Path, config: dict[str, Any], **changed: tuple[int, ...]) -> None:
    """changed: other shapes for some of the tensors."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, size in (tensors_of(config) | changed).items():
        begin, count = end, 2
        for dimension in size:
            count *= dimension
        end += count
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + end)  # a hole: it takes no space on the disk
