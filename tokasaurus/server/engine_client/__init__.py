"""The server's side of the managers: sends requests to a replica, and gathers what comes back.

Knows replicas, their prefixes and load, and which requests are unfinished; after a death it sends them again. Does not
know HTTP or text.
"""
