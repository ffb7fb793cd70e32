"""This server, over HTTP: where its time goes, its cost of a request, gaps in streams, shared prompts."""
