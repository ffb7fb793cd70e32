"""Quantised weights in safetensors files: compressed-tensors, AWQ, GPTQ, torchao and MXFP4.

Knows what config.json says of them, how several stored tensors are one weight, and its numbers. Does not know which
weights a model has.
"""
