"""The manager without a model: its CPU time, how full it keeps the KV cache, and how it keeps a fast worker busy."""
