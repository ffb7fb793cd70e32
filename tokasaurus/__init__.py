"""Tokasaurus: an LLM inference server for high-throughput workloads."""

__version__ = "0.2.0"
"""Of the package, `toka --version` and GET /version. pyproject.toml reads it here."""
