"""Converts GGUF files to directories in Hugging Face format."""
