"""Who sent a request, so that clients get equal shares of the engine."""

from fastapi import Request


def client_of(request: Request) -> str:
    """The same for all requests of one client: the address and port of its connection."""
    if request.client is None:  # a Unix socket
        return ""
    return f"{request.client.host}:{request.client.port}"
