"""`toka map`: answers the rows of files, as `LLM.map` does, without a script.

Knows its flags, and what it prints. Does not know how rows are read, sent or stored: the library does.
"""
