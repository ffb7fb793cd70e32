"""Authentication: clients must send the server's API key."""

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tokasaurus.server.errors import WrongApiKey, error_response

# Load balancers check health without the key.
OPEN_PATHS = frozenset({"/health"})


class ApiKeyMiddleware:
    """Answers 401, without reading the body, to requests without `Authorization: Bearer <api_key>`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = WrongApiKey("this server requires its key in the header Authorization: Bearer <key>, which is missing")
        if "authorization" in Headers(scope=scope):
            error = WrongApiKey("the key in the header Authorization: Bearer <key> is not this server's")
        await error_response(error)(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Digests have a fixed length, so the time of the comparison does not depend on the key.
        return scheme.lower() == "bearer" and hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._digest)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
