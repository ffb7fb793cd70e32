"""Bodies as bytes: JSON with a limited number of values, and multipart forms.

Knows syntax and limits. Does not know the fields of any endpoint.
"""
