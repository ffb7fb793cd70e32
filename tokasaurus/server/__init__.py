"""The server process: HTTP, text, and the requests that are open.

Knows clients, bodies, the tokenizer and the replicas' prefixes and load. Does not know KV blocks or tensors; it sends a
`GenerateRequest` and gathers `SequenceDelta`s.
"""
