"""Qwen 3, the dense models."""

from tokasaurus.model.decoder.decoder import DecoderOptions

QWEN3 = DecoderOptions(qk_norm=True)
