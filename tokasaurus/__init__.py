"""Tokasaurus: an LLM inference server for high-throughput workloads."""
