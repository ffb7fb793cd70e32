"""Qwen 3, the dense models."""

from tokasaurus.model.architectures.decoder import DecoderOptions

QWEN3 = DecoderOptions(qk_norm=True)
