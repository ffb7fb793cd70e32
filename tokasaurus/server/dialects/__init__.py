"""Other APIs than OpenAI's for completions and chat, each in one file: body, preparation, answer, errors, routes.

Knows how other servers' bodies and answers look. Does not know how a request is run, nor of another dialect.
"""
