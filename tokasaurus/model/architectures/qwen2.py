"""Qwen 2 and 2.5."""

from tokasaurus.model.architectures.decoder import DecoderOptions

QWEN2 = DecoderOptions(qkv_bias=True)
