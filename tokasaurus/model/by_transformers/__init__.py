"""Models that transformers' own classes compute, with our attention, linear layers and sampling.

Knows transformers' modules, which no other part of the model imports. Does not know any family.
"""
