"""Adapters with random numbers, as PEFT saves them, and the models that transformers computes with them."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Modules of the linear layers."""


def save_adapter(directory: Path, base: PreTrainedModel, seed: int, size: float = 0.1, **options: Any) -> PeftModel:
    """Writes an adapter of `base`; returns the model that has it, in float32. size: of its numbers. options: of
    LoraConfig."""
    torch.manual_seed(seed)
    adapted = get_peft_model(deepcopy(base), LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ALL, **options}))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:  # B begins as zeros
                parameter.add_(torch.randn(parameter.shape) * size)
    adapted.save_pretrained(str(directory))
    return adapted.eval()
