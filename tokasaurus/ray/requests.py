"""HTTP requests and answers as they go from Serve's ingress to a replica and back, and what routing reads of a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tokasaurus.server.engine_client.replicas import RoutedPrompt, hash_prefixes

_BYTES_PER_TOKEN = 4
"""Rough bytes of text per token: prefixes of texts are hashed in units of so many bytes, prefixes of token ids in
tokens."""

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request for a replica."""

    method: str
    target: str
    """Path with the query."""
    headers: Headers
    body: bytes
    prompt: RoutedPrompt | None
    """None where no prompt is known: any replica will do."""


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """The first part of a replica's answer."""

    status: int
    headers: Headers
    body: bytes | None
    """The whole body. None: parts of it follow, each some whole events."""


class EngineLost(Exception):
    """The replica's processes have ended, or end, before the answer was complete."""


def routed_prompt(headers: Mapping[bytes, bytes], body: bytes) -> RoutedPrompt | None:
    """What the prompt of a request to an endpoint that generates begins with, as far as it can be told without the
    model's tokenizer and template.

    None if it has no prompt: the replica says what is wrong. Equal beginnings give equal prefixes, of the first prompt
    if there are several. Hashes are of this process alone."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:  # it may be compressed
        return None
    if not isinstance(fields, dict):
        return None
    units = _units(fields)
    if units is None:
        return None
    salt = fields.get("cache_salt")
    session = next((headers[name] for name in (b"x-session-id", b"x-smg-routing-key") if headers.get(name)), b"")
    prefixes = hash_prefixes(units, salt if isinstance(salt, str) else "")
    return RoutedPrompt(len(units), prefixes, session.decode("latin-1"))


def _units(fields: Mapping[str, Any]) -> NDArray[np.int32] | None:
    """[N]: the prompt, in token ids or in units of text; None if there is none."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        try:
            return np.array(prompt, np.int32)
        except (ValueError, TypeError, OverflowError):
            return None
    if isinstance(prompt, str):
        return _units_of(prompt.encode(errors="replace"))
    # In the order in which templates write them.
    asked = [fields[name] for name in ("tools", "instructions", "system", "messages", "input") if fields.get(name)]
    return _units_of(b"".join(map(orjson.dumps, asked))) if asked else None


def _units_of(text: bytes) -> NDArray[np.int32]:
    whole = len(text) // _BYTES_PER_TOKEN * _BYTES_PER_TOKEN
    return np.frombuffer(text[:whole], np.int32)
