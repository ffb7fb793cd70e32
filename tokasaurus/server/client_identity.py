"""Who sends a request: the name of its API key if there are several, or else its connection."""

import dataclasses
from collections.abc import Sequence
from contextvars import ContextVar
from typing import cast

from fastapi import Request
from starlette.types import Scope

from tokasaurus.messages.generation import GenerateRequest

_CLIENT_ID = "client_id"
# Of the request that runs in this context. A context variable, since the lines of a bulk request run in tasks of
# their own.
_key_salt: ContextVar[str] = ContextVar("key_salt", default="")


def set_client(scope: Scope, client_id: str | None, key_salt: str = "") -> None:
    """Note who sends the request of `scope`, in whose task this must be called.

    client_id: None if the key does not tell. key_salt: separates cached prompts of different keys; "" shares them.
    """
    scope.setdefault("state", {})[_CLIENT_ID] = client_id
    _key_salt.set(key_salt)


def use_key_salt(salt: str) -> None:
    """For work in the task of this call that is done for an earlier request, see `key_salt`."""
    _key_salt.set(salt)


def key_salt() -> str:
    """What separates cached prompts of the key that sent the request of this task; "" if nothing does."""
    return _key_salt.get()


def client_of(request: Request) -> str:
    """The name of the request's API key; if there are not several, the address and port of its connection."""
    client_id = request.scope.get("state", {}).get(_CLIENT_ID)
    if client_id is not None:
        return cast(str, client_id)
    return "unknown" if request.client is None else f"{request.client.host}:{request.client.port}"


def add_key_salt(requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    """The same requests; if prompts are cached by key, no other key shares their KV, whatever salt its body has."""
    salt = _key_salt.get()
    if not salt:
        return list(requests)
    return [dataclasses.replace(request, cache_salt=f"{salt}:{request.cache_salt}") for request in requests]
