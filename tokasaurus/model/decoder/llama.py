"""Llama 3.x, and the models of its shape such as SmolLM2."""

from tokasaurus.model.decoder.decoder import DecoderOptions

LLAMA = DecoderOptions()
