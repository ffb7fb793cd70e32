"""The table of model families, and building the decoder of one."""

import torch

from tokasaurus.checkpoint import CheckpointError, ModelInfo
from tokasaurus.model.decoder.decoder import Decoder, DecoderOptions
from tokasaurus.model.parallel.mesh import Mesh

FAMILIES = {
    "llama": DecoderOptions(),  # Llama 3.x, and models of the same architecture such as SmolLM2
    "qwen2": DecoderOptions(qkv_bias=True),  # Qwen 2 and 2.5
    "qwen3": DecoderOptions(qk_norm=True),  # Qwen 3, the dense models
}
"""Options of the decoder by model_type in config.json."""


def build_decoder(info: ModelInfo, mesh: Mesh, dtype: torch.dtype) -> Decoder:
    """This rank's part of the model, on the meta device. Raises CheckpointError for an unregistered family."""
    if info.family not in FAMILIES:
        raise CheckpointError(f"model_type {info.family!r} is not supported; these are: {', '.join(sorted(FAMILIES))}")
    return Decoder(info, FAMILIES[info.family], mesh, dtype)
