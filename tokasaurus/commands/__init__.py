"""The sub-commands of `toka`: a file or a folder each, with the command's flags and what it prints.

Knows the library, a running server's HTTP API, or a process that serves. Does not know how either computes.
"""
