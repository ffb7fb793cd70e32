"""From tokens to answers: text and log-probabilities, whole or in chunks.

Knows a request's choices and the tokenizer. Does not know HTTP or the engine.
"""
