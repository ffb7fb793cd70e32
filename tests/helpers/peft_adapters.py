"""Adapters that peft makes for small models, and the texts of the models that peft merges them into."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: list[dict[str, Any]] = [
    {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    {"r": 16, "lora_alpha": 8, "target_modules": LINEAR},
    {"r": 7, "use_rslora": True, "target_modules": ["o_proj", "down_proj"], "rank_pattern": {"down_proj": 3}},
    {"r": 2, "target_modules": [*LINEAR, "embed_tokens"], "modules_to_save": ["lm_head"]},
]
"""Options of LoraConfig."""


def _base(model: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return loaded


def save_adapter(model: Path, directory: Path, seed: int, **options: Any) -> Path:
    """An adapter with random numbers, so that it changes most greedy tokens. options: of LoraConfig; by default those
    of KINDS by the seed."""
    torch.manual_seed(seed)
    adapted = get_peft_model(_base(model), LoraConfig(**(options or KINDS[seed % len(KINDS)])))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    adapted.save_pretrained(str(directory))
    return directory


def merged_model(model: Path, adapter: Path | None) -> PreTrainedModel:
    """None: the model itself."""
    if adapter is None:
        return _base(model)
    merged: PreTrainedModel = PeftModel.from_pretrained(_base(model), str(adapter)).merge_and_unload()
    return merged.eval()


@torch.no_grad()
def greedy_ids(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The most likely tokens, one after the other."""
    ids = [*prompt]
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
