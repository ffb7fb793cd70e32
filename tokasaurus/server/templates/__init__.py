"""Chat templates: the model's own and those that requests bring, with what the server finds out about each.

Knows messages as templates take them. Does not know bodies.
"""
