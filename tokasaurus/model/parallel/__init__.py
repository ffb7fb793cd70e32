"""Ranks: which layers, heads and rows are whose, and the collectives and links between ranks.

Knows the mesh of one replica. Does not know the layers that use it.
"""
