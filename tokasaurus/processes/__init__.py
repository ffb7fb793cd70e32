"""The launcher: starts, watches, restarts and ends the server, managers and model workers.

Knows which processes there are and what they send it. Does not know what any of them does.
"""
