"""Converts GGUF files to directories in Hugging Face format.

Knows both formats. Does not know the models that read the result.
"""
