"""Chat templates: the model's own and the templates of requests, with what the server finds out about each.

Knows messages as templates take them. Does not know bodies.
"""
