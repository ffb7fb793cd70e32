"""From a validated body to a `GenerateRequest`: chat template, tokens, limits, tools, grammar.

Knows the model's tokenizer and limits. Does not know replicas or how an answer is built.
"""
