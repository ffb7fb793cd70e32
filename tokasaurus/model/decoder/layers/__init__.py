"""The parts of a decoder layer as torch modules.

Knows weights and one rank's shard of them. Does not know the order in which a layer calls its parts.
"""
