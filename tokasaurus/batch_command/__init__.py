"""`toka batch`: runs a file of requests through a server of its own, and continues after any crash.

Knows the lines of the input, which of them are answered, and how to start and reach a server. Does not know how a
request is prepared or scheduled: it is a client of the OpenAI API.
"""
