"""Token ids and text: tokenizer, detokenizer, stop strings, special tokens, grammars' view of the vocabulary.

Knows one vocabulary. Does not know requests; both the server and the manager use it.
"""
