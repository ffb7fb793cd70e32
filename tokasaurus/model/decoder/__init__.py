"""The decoder: layers of any spec as torch modules, loading weights, and torch.compile.

Knows a rank's shard of one stage of the model. Does not know how attention is computed, or which tokens a step has.
"""
