"""`toka batch`: runs a file of requests, and continues after any crash.

Knows the lines of the input, which of them are answered, and where they run: a database that a server of its own
shares, or a running server's API. Does not know how a request is prepared or scheduled.
"""
