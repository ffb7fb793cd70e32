"""Any OpenAI-compatible server under a load: requests, a client, results, and a comparison of several servers."""
