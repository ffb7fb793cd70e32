"""Small GGUF files of one type, and transformers' models of the same weights."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.checkpoint.dequantized import write_dequantized


def quantised(directory: Path, family: str, kind: str, tied: bool = False) -> tuple[Path, PreTrainedModel]:
    """The checkpoint's directory, and transformers' model of it."""
    path = directory / "model.gguf"
    weights = {name: array / np.float32(8) for name, array in random_weights(family, tied).items()}
    write_gguf(path, family, weights, GGMLQuantizationType[kind])
    checkpoint = resolve_checkpoint(str(path)).directory
    plain = directory / "plain"
    plain.mkdir()
    write_dequantized(checkpoint, plain)
    return checkpoint, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
