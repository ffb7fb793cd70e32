"""Bodies of files, batches and their lines, as they are on the wire.

Knows the OpenAI API. Imports little: the process that validates lines loads it.
"""
