"""Bulk requests and batches: lines that run until each has exactly one result; and the files of batches.

Knows the store, the course of a batch, and when lines may run. Does not know how a request is computed:
`server/endpoints.py` runs each line as it runs a live request.
"""
