"""What all requests share and could exhaust: bytes of bodies, threads for text, collections of garbage.

Knows limits. Does not know what a request asks for.
"""
