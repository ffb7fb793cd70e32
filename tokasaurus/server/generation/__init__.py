"""The common path of a live request and of a line of a batch: prepare, generate, build the answer.

Knows the order of these calls. Does not know whether an answer goes to a client or into a file.
"""
