"""Bodies as they are on the wire, and what each field may be.

Knows the OpenAI API and our fields beside it. Does not know the model.
"""
