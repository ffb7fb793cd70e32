"""The last events of a stream whose replica has died, in the form of its endpoint. Knows no Ray."""

from __future__ import annotations

from typing import Any

import orjson

from tokasaurus.server.dialects.messages import error_type, is_for_messages
from tokasaurus.server.errors import ApiError
from tokasaurus.server.respond.stream import error_event
from tokasaurus.text.json_lines import write_json

_RESPONSES = "/v1/responses"
_DATA = b"data: "


class StreamWatch:
    """What the last events of a stream need to know of those before them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._num_events = 0
        self._first: dict[str, Any] | None = None
        """The data of the first event, of /v1/responses alone."""

    def note(self, events: bytes) -> None:
        """These whole events are sent."""
        if self._path != _RESPONSES:
            return
        self._num_events += events.count(b"\n\n")
        if self._first is None:
            line = next((line for line in events.split(b"\n") if line.startswith(_DATA)), None)
            self._first = None if line is None else orjson.loads(line.removeprefix(_DATA))

    def failure(self, error: ApiError) -> bytes:
        """The last events."""
        if is_for_messages(self._path.encode()):
            return _event("error", error={"type": error_type(error.status), "message": error.message})
        if self._path != _RESPONSES:
            return error_event(error)
        number = self._num_events
        told = _event("error", sequence_number=number, code=error.code, message=error.message, param=error.param)
        if self._first is None:
            return told
        failed = self._first["response"] | {
            "status": "failed",
            "error": {"code": "server_error", "message": error.message},
        }
        return told + _event("response.failed", sequence_number=number + 1, response=failed)


def _event(kind: str, **content: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), write_json({"type": kind, **content}))
