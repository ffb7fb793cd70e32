"""The manager process: decides what each step of the model worker computes.

Knows tokens, sequences, slots, KV blocks and the times that steps take. Does not know HTTP, text or torch; it sends a
`ForwardInput` and reads a `ForwardOutput`.
"""
