"""The decoder: its layers as torch modules, one table of families, loading weights, and torch.compile.

Knows a rank's shard of one stage of the model. Does not know how attention is computed, or which tokens a step has.
"""
