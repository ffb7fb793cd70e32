"""A line of a bulk request or of a batch: its parse, and its result in OpenAI's format."""

import uuid
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from tokasaurus.server.endpoints import ENDPOINTS, Answer, Endpoint
from tokasaurus.server.errors import ApiError, InvalidRequest, error_response
from tokasaurus.server.jobs.validation_process import MAX_CUSTOM_ID_CHARS
from tokasaurus.server.json_values import load_json, validate_body
from tokasaurus.server.prepare.requests import Origin
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.state import ServerState
from tokasaurus.text.json_lines import write_json


class BulkLine(BaseModel):
    """custom_id: the caller's unique name of the line. body: a request body for the route `url`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    custom_id: Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]
    method: Literal["POST"] = "POST"
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]


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


def answered_line(custom_id: str, answer: bytes) -> bytes:
    """answer: the response's JSON."""
    return _line(custom_id, _response(200, answer), None)


def refused_line(custom_id: str, error: ApiError) -> bytes:
    """What a live request would have been answered with."""
    return _line(custom_id, _response(error.status, bytes(error_response(error).body)), None)


def unrun_line(custom_id: str, code: str, message: str) -> bytes:
    """A line that did not run to its end."""
    return _line(custom_id, None, {"code": code, "message": message})


def _response(status: int, body: bytes) -> dict[str, object]:
    return {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": orjson.Fragment(body)}


def _line(custom_id: str, response: dict[str, object] | None, error: dict[str, str] | None) -> bytes:
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return write_json(line, option=orjson.OPT_APPEND_NEWLINE)
