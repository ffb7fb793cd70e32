"""Files and batches of the OpenAI API: each line is run once, whatever crashes.

Knows the store, the course of a batch and what a line asks for. Does not know how a request is computed:
`server/endpoints.py` runs each line as it runs a live request.
"""
