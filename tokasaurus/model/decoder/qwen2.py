"""Qwen 2 and 2.5."""

from tokasaurus.model.decoder.decoder import DecoderOptions

QWEN2 = DecoderOptions(qkv_bias=True)
