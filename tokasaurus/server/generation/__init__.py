"""Lines of bulk requests and batches: each names an endpoint and contains a body for it.

Knows the form of a line. Does not know whether an answer goes to a client or into a file.
"""
