"""Decisions as pure functions over arrays and numbers: the KV simulation, step budgets, step times, prefix groups.

Knows what its arguments say. Does not know `EngineState`, queues or clocks, and changes nothing: each function can be
compared with a slow one in a test.
"""
