"""The data of one engine: sequences, arrays by slot, queues, grammar matchers.

Knows how its parts stay consistent with each other. Does not decide anything; policies are in `engine` and
`planning`.
"""
