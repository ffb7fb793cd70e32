"""The data of one engine: sequences, arrays by slot, queues, grammar matchers.

Knows how its parts stay consistent with each other. It does not know policies, which are in `engine` and `planning`,
apart from two that are the inside of a part of `EngineState` and so cannot lie above it. `sequence_queues` decides in
which order sequences wait (turns of clients, priority and age, background sequences): a queue is nothing but its order.
`grammar_manager` decides which thread compiles a grammar or reads a token, and which compiled grammars are kept.
"""
