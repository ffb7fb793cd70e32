"""POST /v1/bulk"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokasaurus.server.client_identity import client_of
from tokasaurus.server.disconnect import run_while_connected
from tokasaurus.server.errors import ApiError, ClientGone, InvalidRequest, ServerStopping
from tokasaurus.server.openapi import error_responses
from tokasaurus.server.prepare.body import Origin, prepare_chat, prepare_completion
from tokasaurus.server.protocol.bulk import LINE_SCHEMA, MAX_CUSTOM_ID_CHARS, RESULT_SCHEMA, BulkLine
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.respond.whole import build_chat_completion, build_completion
from tokasaurus.server.routes.bulk_lines import BulkRun, IncomingBody, Line, refused
from tokasaurus.server.routes.event_stream import HEADERS
from tokasaurus.server.routes.generation import Body, Build, Prepare, generate_answer
from tokasaurus.server.routes.json_body import MAX_INLINE_BYTES, check_type, load_json, validate_body
from tokasaurus.server.state import ServerState, state_of

router = APIRouter(tags=["generation"])

NDJSON = "application/x-ndjson"
# Media types that clients use for NDJSON; some send the last for any body.
MEDIA_TYPES = (NDJSON, "application/ndjson", "application/jsonl", "application/x-jsonlines", "application/json")


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Body]):
    """The route that a line's url refers to: its body model, and the calls that prepare and build a response."""

    body_model: type[Body]
    prepare: Prepare[Body]
    build: Build


ENDPOINTS: Mapping[str, Endpoint[Any]] = {
    "/v1/completions": Endpoint(CompletionRequest, prepare_completion, build_completion),
    "/v1/chat/completions": Endpoint(ChatCompletionRequest, prepare_chat, build_chat_completion),
}


class BulkStream(Response):
    """Reads the body while it sends results. If the client disconnects, unfinished lines are cancelled."""

    media_type = NDJSON

    def __init__(self, run: BulkRun) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._run = run

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async def write(content: bytes, is_last: bool = False) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": not is_last})

        body = IncomingBody(receive)

        async def answer() -> None:
            # Lets the body be requested first: curl may wait for the "100 Continue" that this triggers.
            await asyncio.sleep(0)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._run.run(body, write)

        try:
            await run_while_connected(body.receive, answer())
        except ClientGone:
            return
        except ServerStopping as stopping:
            # If lines are still unread, the response is cut off without a final chunk.
            await write(self._run.results_of_rest(stopping), is_last=self._run.has_read_all)
            return
        await write(b"", is_last=True)


@router.post(
    "/v1/bulk",
    response_class=Response,
    responses={200: {"content": {NDJSON: {"schema": RESULT_SCHEMA}}}, **error_responses(415, 503)},
    openapi_extra={"requestBody": {"required": True, "content": {NDJSON: {"schema": LINE_SCHEMA}}}},
)
async def bulk(request: Request) -> Response:
    """Run any number of lines, each a body for a generation route; results are sent as they finish, in any order."""
    check_type(request, MEDIA_TYPES)
    state = state_of(request)
    state.ready_limits()
    client = client_of(request)

    async def read_line(content: bytes) -> Line:
        if len(content) <= MAX_INLINE_BYTES:
            return _read_line(content, state, client)
        return await state.text_threads.run(len(content), _read_line, content, state, client)

    return BulkStream(BulkRun(read_line, state.limits.max_line_bytes))


def _read_line(content: bytes, state: ServerState, client: str) -> Line:
    custom_id = None
    try:
        value = _load(content, state.limits.max_json_values)
        if isinstance(value, dict) and isinstance(value.get("custom_id"), str):
            custom_id = value["custom_id"][:MAX_CUSTOM_ID_CHARS]
        line = validate_body(value, BulkLine)
        endpoint = ENDPOINTS[line.url]
        body = validate_body(line.body, endpoint.body_model)
        if body.stream:
            raise InvalidRequest("stream=true is not allowed in a bulk line: each line has a single result", "stream")
    except ApiError as error:
        return refused(custom_id, error)
    origin = Origin(len(content), client)
    return Line(custom_id, lambda: generate_answer(state, body, origin, endpoint.prepare, endpoint.build))


def _load(content: bytes, max_values: int) -> object:
    try:
        return load_json(content, max_values)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"not valid JSON: {error.msg} (character {error.pos})") from None
