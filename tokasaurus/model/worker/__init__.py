"""The model worker's process: loads the model, checks what computes it, sizes the KV cache, then runs steps.

Knows the device, its memory and its speed. Does not know requests; what runs in a step is the manager's decision.
"""
