"""Connections: uvicorn's HTTP/1.1 protocol with limits and timeouts, and the table of all that are open.

Knows bytes and time. Does not know routes or bodies.
"""
