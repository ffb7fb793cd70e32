"""Model families, keyed by model_type in config.json."""

import torch

from tokasaurus.checkpoint import CheckpointError, ModelInfo
from tokasaurus.model.decoder.decoder import Decoder, DecoderOptions
from tokasaurus.model.decoder.llama import LLAMA
from tokasaurus.model.decoder.qwen2 import QWEN2
from tokasaurus.model.decoder.qwen3 import QWEN3
from tokasaurus.model.parallel.mesh import Mesh

FAMILIES: dict[str, DecoderOptions] = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}


def build_decoder(info: ModelInfo, mesh: Mesh, dtype: torch.dtype) -> Decoder:
    """This rank's part of the model, on the meta device. Raises CheckpointError for an unregistered family."""
    if info.family not in FAMILIES:
        raise CheckpointError(f"model_type {info.family!r} is not supported; these are: {', '.join(sorted(FAMILIES))}")
    return Decoder(info, FAMILIES[info.family], mesh, dtype)
