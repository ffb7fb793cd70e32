"""One thin file for each group of endpoints.

Knows paths, status codes and the call of each endpoint. What an endpoint does is in the packages that it calls.
"""
