"""Lines of bulk requests and of batches, from their source to their sink: parsed, run, and answered in OpenAI's format.

Each line is a task. A source (the body of a request, the ledger of a batch) decides when it starts; the sink (a stream,
the ledger) makes its result final."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, Any, Literal, Protocol

import orjson
from pydantic import Field

from tokasaurus.random_ids import random_id
from tokasaurus.server.endpoint import AskedBody, Endpoint
from tokasaurus.server.endpoints import ALL_ENDPOINTS, EndpointUrl
from tokasaurus.server.errors import ApiError, ErrorObject, InvalidRequest, error_response, internal_error
from tokasaurus.server.jobs.store.records import LineResult
from tokasaurus.server.jobs.validation_process import MAX_CUSTOM_ID_CHARS
from tokasaurus.server.json_values import load_json, validate_body
from tokasaurus.server.prepare.requests import Origin
from tokasaurus.server.protocol.fields import StrictObject
from tokasaurus.server.respond.whole import Answer
from tokasaurus.server.state import ServerState
from tokasaurus.text.json_lines import write_json

logger = logging.getLogger(__name__)

BATCH_PREFIX = "batch_req"
"""Prefix of the ids of a batch's results."""
_TASKS_PER_CANCEL = 64
MAX_BYTES_IN_FLIGHT = 64 << 20
"""Bytes of the lines that run, of one bulk request or of all batches together; one line more may begin."""
START_BYTES = 4096
"""Bytes kept of a line that cannot be parsed: enough for its custom_id, if that comes first."""
_FIRST_CUSTOM_ID = re.compile(rb'\s*\{\s*"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')


class BulkLine(StrictObject):
    """custom_id: the caller's unique name of the line. body: a request body for the route `url`."""

    custom_id: Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]
    method: Literal["POST"] = "POST"
    url: EndpointUrl
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
    body: AskedBody
    """The line's body, validated by the endpoint's body model."""

    async def answer(self, state: ServerState, origin: Origin) -> Answer:
        """The answer to the line, by its endpoint. Raises ApiError."""
        return await self.endpoint.answer(state, self.body, origin)


def parse_line(content: bytes, max_values: int) -> ParsedLine:
    """max_values: as in `load_json`. Must run in a thread unless `is_parsed_quickly`. Raises LineRefused."""
    custom_id = None
    try:
        value = _load(content, max_values)
        if isinstance(value, dict) and isinstance(value.get("custom_id"), str):
            custom_id = value["custom_id"][:MAX_CUSTOM_ID_CHARS]
        line = validate_body(value, BulkLine)
        endpoint = ALL_ENDPOINTS[line.url]
        body = validate_body(line.body, endpoint.body_model)
        if body.stream:
            raise InvalidRequest("stream=true is not allowed in a line: each line has a single result", "stream")
    except ApiError as error:
        raise LineRefused(first_custom_id(content) if custom_id is None else custom_id, error) from None
    return ParsedLine(line.custom_id, len(content), endpoint, body)


def _load(content: bytes, max_values: int) -> object:
    try:
        return load_json(content, max_values)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"not valid JSON: {error.msg} (character {error.pos})") from None


def first_custom_id(start: bytes) -> str | None:
    """The custom_id of a line that cannot be parsed; None if the line does not begin with one."""
    match = _FIRST_CUSTOM_ID.match(start[:START_BYTES])
    try:
        return None if match is None else str(orjson.loads(match[1]))[:MAX_CUSTOM_ID_CHARS]
    except orjson.JSONDecodeError:
        return None


@dataclass(slots=True, eq=False)
class Line:
    """A line to run."""

    custom_id: str | None
    """None if it has no readable one."""
    answer: Callable[[], Awaitable[Answer]]
    """Raises ApiError."""
    num_bytes: int = 0
    """Bytes that it takes while it is in the engine."""
    num_sequences: int = 1
    """Sequences that it takes in the engine."""
    number: int = 0
    """Number of the line in its source, from 0."""
    attempts: int = 0
    """How often it had been started before."""


def refused(custom_id: str | None, error: ApiError) -> Line:
    """A line whose result is this error."""

    async def answer() -> Answer:
        raise error

    return Line(custom_id, answer)


class AfterError(Enum):
    """What becomes of a line that got an error in place of an answer."""

    FINAL = auto()
    """The error is its result."""
    AGAIN = auto()
    """It runs again now."""
    TAKEN_BACK = auto()
    """Its source starts it again later, as if it had not run."""


class Sink(Protocol):
    """Where the results of a source's lines go: a stream, or the ledger of a batch."""

    id_prefix: str
    """Prefix of the ids of its results."""
    repeats_errors: bool
    """Whether a result's field `error` repeats the error of its response."""

    async def store(self, line: Line, result: LineResult) -> None:
        """Returns when the result is final. The line has left the engine. If the caller is cancelled, the result is
        stored nevertheless, or the line runs again."""

    async def after_error(self, line: Line, error: ApiError) -> AfterError:
        """What becomes of the line; may wait until it makes sense to try again."""


class LineRunner:
    """The lines of one source that run. Each gets exactly one result in the sink, unless the sink takes it back.

    The source starts lines and looks at what runs: how many may run, and in which order, is its own decision."""

    def __init__(self, sink: Sink, on_end: Callable[[Line], None] = lambda _: None) -> None:
        """on_end: called when a line has its result, was taken back, or was cancelled."""
        self.lines: dict[asyncio.Task[None], Line] = {}
        """Lines that run: in the engine, or with a result that is not final yet."""
        self.num_sequences = 0
        """Sequences of its lines in the engine."""
        self.num_bytes = 0
        """Bytes of its lines in the engine."""
        self._sink = sink
        self._on_end = on_end

    def start(self, line: Line) -> None:
        self.num_sequences += line.num_sequences
        self.num_bytes += line.num_bytes
        task = asyncio.create_task(self._run(line))
        self.lines[task] = line
        task.add_done_callback(self._end)

    async def cancel(self) -> None:
        """Returns when no line runs. Not all at once, since the event loop serves nobody else meanwhile."""
        tasks = list(self.lines)
        for first in range(0, len(tasks), _TASKS_PER_CANCEL):
            some = tasks[first : first + _TASKS_PER_CANCEL]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)

    async def _run(self, line: Line) -> None:
        after, result = AfterError.AGAIN, None
        while after is AfterError.AGAIN:
            try:
                result = self._result(line, await line.answer())
                break
            except ApiError as known:
                error = known
            except Exception:
                logger.exception("a line failed")
                error = internal_error()
            after = await self._sink.after_error(line, error)
            if after is AfterError.FINAL:
                result = LineResult(line.number, True, error_line(self._sink, line.custom_id, error))
        if result is not None:
            self._leave_engine(line)
            await self._sink.store(line, result)

    def _result(self, line: Line, answer: Answer) -> LineResult:
        content = answered_line(self._sink.id_prefix, line.custom_id, answer.content)
        usage = answer.usage
        return LineResult(
            line.number,
            False,
            content,
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens,
            usage.completion_tokens,
            usage.completion_tokens_details.reasoning_tokens,
        )

    def _leave_engine(self, line: Line) -> None:
        """Others may take its share."""
        self.num_sequences -= line.num_sequences
        self.num_bytes -= line.num_bytes
        line.num_sequences = line.num_bytes = 0

    def _end(self, task: asyncio.Task[None]) -> None:
        line = self.lines.pop(task)
        self._leave_engine(line)
        self._on_end(line)


def answered_line(id_prefix: str, custom_id: str | None, answer: bytes) -> bytes:
    """answer: the response's JSON."""
    return _result_line(id_prefix, custom_id, 200, answer)


def error_line(sink: Sink, custom_id: str | None, error: ApiError) -> bytes:
    """The result of a line that a live request's error ends."""
    shown = error.as_object() if sink.repeats_errors else None
    return _result_line(sink.id_prefix, custom_id, error.status, bytes(error_response(error).body), shown)


def unrun_line(custom_id: str, code: str, message: str) -> bytes:
    """The result of a line of a batch that did not run to its end."""
    error = ApiError(message)
    error.code = code
    return _result_line(BATCH_PREFIX, custom_id, None, b"", error.as_object())


def _result_line(
    id_prefix: str, custom_id: str | None, status: int | None, body: bytes, error: ErrorObject | None = None
) -> bytes:
    """A line of OpenAI's batch output, with its line end. status: None for a line without a response. body: JSON."""
    unique = random_id()
    response = None
    if status is not None:
        response = {"status_code": status, "request_id": f"req_{unique}", "body": orjson.Fragment(body)}
    line = {"id": f"{id_prefix}_{unique}", "custom_id": custom_id, "response": response, "error": error}
    return write_json(line, option=orjson.OPT_APPEND_NEWLINE)
