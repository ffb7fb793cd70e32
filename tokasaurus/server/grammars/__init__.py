"""Validates grammars in a child process, so that one that crashes its compiler ends nothing else.

Knows llguidance only in the child. Does not know what a grammar is for.
"""
