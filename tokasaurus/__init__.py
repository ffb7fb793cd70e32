"""Tokasaurus: an LLM inference server for jobs of many tokens."""
