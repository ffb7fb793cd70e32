"""Limits on what a request may contain and on the size of its answer, and the bytes of all bodies being received."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokasaurus.server.errors import TooManyBodies

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Each field has the name, the default and the meaning of a flag."""

    max_request_bytes: int | None = 64 << 20
    """Bytes of a body; None: no limit."""
    max_body_bytes_in_all: int = 1 << 30
    """Bytes of all bodies that are being received or parsed, except those of /v1/bulk; also of a single one."""
    max_line_bytes: int = 16 << 20
    """Bytes of a line of /v1/bulk. Longer lines are not kept in memory."""
    max_answer_values: int = 1 << 25
    """Tokens and logprobs of all choices of an answer that is not streamed."""
    max_tokenize_chars: int = 1 << 20
    """Characters of a prompt, or of all messages together, at /tokenize; also the token ids at /detokenize."""
    max_json_values: int = 1 << 20
    """JSON values of a body or bulk line: each list or object counts as eight more, each key as three more."""
    max_stop_strings: int = 16
    """Stop strings of a request."""
    max_stop_chars: int = 1024
    """Characters of each of them."""


def request_limits(config: ServerConfig) -> RequestLimits:
    """The limits that the flags set."""
    return RequestLimits(
        max_request_bytes=config.max_request_bytes,
        max_body_bytes_in_all=config.max_body_bytes_in_all,
        max_line_bytes=config.max_line_bytes,
        max_answer_values=config.max_answer_values,
        max_tokenize_chars=config.max_tokenize_chars,
        max_json_values=config.max_json_values,
        max_stop_strings=config.max_stop_strings,
        max_stop_chars=config.max_stop_chars,
    )


class BodyBytes:
    """Bytes of all bodies that are not parsed yet, up to `max_bytes`. Used by the event loop only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @contextmanager
    def of_one_body(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts further bytes of a body, until the context ends. It raises TooManyBodies."""
        num_own_bytes = 0

        def add(num_bytes: int) -> None:
            nonlocal num_own_bytes
            if self._num_bytes + num_bytes > self._max_bytes:
                limit = f"{self._max_bytes} bytes (max_body_bytes_in_all)"
                raise TooManyBodies(f"the bodies that the server is receiving may have at most {limit} together")
            self._num_bytes += num_bytes
            num_own_bytes += num_bytes

        try:
            yield add
        finally:
            self._num_bytes -= num_own_bytes
