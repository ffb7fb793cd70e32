"""Tool calls: how the model writes them, by its chat template; a parser, and a grammar that forces them.

Knows text and the fields of calls. Does not know tokens or requests.
"""
