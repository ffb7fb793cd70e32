"""POST /v1/bulk"""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokasaurus.server.client_identity import client_of
from tokasaurus.server.disconnect import run_while_connected
from tokasaurus.server.errors import ClientGone, ServerStopping
from tokasaurus.server.generation.line import LineRefused, parse_line
from tokasaurus.server.openapi import error_responses
from tokasaurus.server.parsing.json_values import MAX_INLINE_BYTES
from tokasaurus.server.prepare.origin import Origin
from tokasaurus.server.protocol.bulk import LINE_SCHEMA, RESULT_SCHEMA
from tokasaurus.server.routes.bulk_lines import BulkRun, IncomingBody, Line, refused
from tokasaurus.server.routes.event_stream import HEADERS
from tokasaurus.server.routes.json_body import check_type
from tokasaurus.server.state import ServerState, state_of

router = APIRouter(tags=["generation"])

NDJSON = "application/x-ndjson"
# Media types that clients use for NDJSON; some send the last for any body.
MEDIA_TYPES = (NDJSON, "application/ndjson", "application/jsonl", "application/x-jsonlines", "application/json")


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
    try:
        parsed = parse_line(content, state.limits.max_json_values)
    except LineRefused as refusal:
        return refused(refusal.custom_id, refusal.error)

    async def answer() -> bytes:
        return (await parsed.answer(state, Origin(parsed.num_bytes, client))).content

    return Line(parsed.custom_id, answer)
