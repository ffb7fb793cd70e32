"""Tokens and log-probabilities from logits: one set of rules, computed by plain torch, Triton or C++.

Knows the rows of one step and their parameters. Does not know where the logits come from or what a client asked for.
"""
