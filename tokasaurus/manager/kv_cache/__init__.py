"""The KV cache as the manager sees it: which blocks are free, and which prefix each cached block holds.

Knows block ids, reference counts and token ids. Does not know tensors, nor which sequence should get a block.
"""
