"""Attention over a paged KV cache: one interface, and its implementations from slow and plain to fast.

Knows blocks, query rows and the layout of a forward. Does not know requests, nor which rows decode or prefill.
"""
