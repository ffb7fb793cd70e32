"""A line of a bulk request or of a batch → the body of a generation route."""

from dataclasses import dataclass
from typing import Any

import orjson

from tokasaurus.server.endpoints import ENDPOINTS, Answer, Endpoint
from tokasaurus.server.errors import ApiError, InvalidRequest
from tokasaurus.server.parsing.json_values import load_json, validate_body
from tokasaurus.server.prepare.requests import Origin
from tokasaurus.server.protocol.bulk import BulkLine
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.protocol.storage.custom_id import MAX_CUSTOM_ID_CHARS
from tokasaurus.server.state import ServerState


class LineRefused(Exception):
    """The line cannot be run. custom_id: None if it has no readable one."""

    def __init__(self, custom_id: str | None, error: ApiError) -> None:
        super().__init__(custom_id, error)
        self.custom_id = custom_id
        self.error = error


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """A line whose body matches the model of its endpoint."""

    custom_id: str
    num_bytes: int
    endpoint: Endpoint[Any]
    body: Any
    """The line's body, validated by the endpoint's body model."""

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine will run for it."""
        num_prompts = len(self.body.prompt) if isinstance(self.body, CompletionRequest) else 1
        return num_prompts * int(self.body.n)

    async def answer(self, state: ServerState, origin: Origin) -> Answer:
        """As `Endpoint.answer`."""
        return await self.endpoint.answer(state, self.body, origin)


def parse_line(content: bytes, max_values: int) -> ParsedLine:
    """max_values: as in `load_json`. A line longer than MAX_INLINE_BYTES must be parsed in a thread. Raises
    LineRefused."""
    custom_id = None
    try:
        value = _load(content, max_values)
        if isinstance(value, dict) and isinstance(value.get("custom_id"), str):
            custom_id = value["custom_id"][:MAX_CUSTOM_ID_CHARS]
        line = validate_body(value, BulkLine)
        endpoint = ENDPOINTS[line.url]
        body = validate_body(line.body, endpoint.body_model)
        if body.stream:
            raise InvalidRequest("stream=true is not allowed in a line: each line has a single result", "stream")
    except ApiError as error:
        raise LineRefused(custom_id, error) from None
    return ParsedLine(line.custom_id, len(content), endpoint, body)


def _load(content: bytes, max_values: int) -> object:
    try:
        return load_json(content, max_values)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"not valid JSON: {error.msg} (character {error.pos})") from None
