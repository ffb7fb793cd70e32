"""Authentication: clients must send one of the server's API keys."""

import hashlib
import hmac
import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tokasaurus.checkpoint.cache import expand_home
from tokasaurus.messages.lifecycle import UserError
from tokasaurus.server.client_identity import set_client
from tokasaurus.server.errors import WrongApiKey, error_response

# Load balancers check these without the key.
OPEN_PATHS = frozenset({"/health", "/ready"})
_KEY = re.compile("[!-~]+")


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    """Identifies the key in the server."""
    digest: bytes
    """SHA-256 of the key. A fixed length, so the time of a comparison does not depend on the key."""


def read_api_keys(api_key: str | None, keys_file: str | None) -> list[ApiKey]:
    """The key of the flag or environment, and those of a file. No keys: the server needs none.

    The file has a key per line, after a name and white space if wanted; # begins a comment line. Several keys may have
    one name: they belong to the same client. Raises UserError, which shows no key.
    """
    keys = [] if api_key is None else [_make_key(api_key, None)]
    if keys_file is not None:
        keys += _read_file(keys_file)
    if len({key.digest for key in keys}) < len(keys):
        raise UserError("api_keys_file=, api_key= (or TOKA_API_KEY): one key is given twice")
    return keys


def _read_file(path: str) -> list[ApiKey]:
    try:
        lines = expand_home("api_keys_file", path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"api_keys_file={path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"api_keys_file={path}: must be text in UTF-8") from None
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or not _KEY.fullmatch(words[-1]):
            what = "a key, or a name and a key; keys are printable ASCII without spaces"
            raise UserError(f"api_keys_file={path}: line {number} must be {what}")
        keys.append(_make_key(words[-1], words[0] if len(words) == 2 else None))
    if not keys:
        raise UserError(f"api_keys_file={path}: has no key")
    return keys


def _make_key(key: str, name: str | None) -> ApiKey:
    digest = _digest(key.encode())
    return ApiKey(f"key-{digest.hex()[:12]}" if name is None else name, digest)


class ApiKeyMiddleware:
    """Answers 401, without reading the body, to requests without `Authorization: Bearer <key>`.

    Notes the client that a key belongs to. salt_by_key: requests share cached prompts only with the same client's.
    """

    def __init__(self, app: ASGIApp, keys: list[ApiKey], salt_by_key: bool) -> None:
        self._app = app
        self._keys = keys
        self._salts = {key.name: _digest(b"salt:" + key.name.encode()).hex() if salt_by_key else "" for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = self._find(Headers(scope=scope))
        if key is not None:
            # With a single key, everybody has it: connections tell more about who asks.
            set_client(scope, key.name if len(self._salts) > 1 else None, self._salts[key.name])
            await self._app(scope, receive, send)
            return
        error = WrongApiKey("this server requires a key in the header Authorization: Bearer <key>, which is missing")
        if "authorization" in Headers(scope=scope):
            error = WrongApiKey("the key in the header Authorization: Bearer <key> is not known to this server")
        await error_response(error)(scope, receive, send)

    def _find(self, headers: Headers) -> ApiKey | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = _digest(key.strip().encode("latin-1"))
        found = None
        for known in self._keys:  # all of them: the time does not tell which one matches
            if hmac.compare_digest(digest, known.digest):
                found = known
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
