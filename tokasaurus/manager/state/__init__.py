"""The data of one engine: sequences, arrays by slot, queues, grammar matchers.

Knows how its parts stay consistent with each other, and in which order sequences wait. Does not decide anything else;
policies are in `engine` and `planning`.
"""
