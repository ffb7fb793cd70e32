"""Llama 3.x, and models of the same architecture such as SmolLM2."""

from tokasaurus.model.decoder.decoder import DecoderOptions

LLAMA = DecoderOptions()
