"""`toka top`: a running server in a terminal, and recordings of one.

Knows the samples of `GET /live`, what follows from a series of them, and how it is drawn. Does not know how a server
takes samples, or what an engine is beyond them.
"""
