"""Reads GGUF files as models in Hugging Face format.

Knows both formats. Does not know the models that read the result.
"""
