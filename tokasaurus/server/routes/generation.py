"""Routes that generate text, vectors or scores: whole and streamed answers, cancelled if the client disconnects."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response

from tokasaurus.server.access import client_of, session_of
from tokasaurus.server.endpoint import Body, Endpoint, StreamedAnswer
from tokasaurus.server.endpoints import ALL_ENDPOINTS
from tokasaurus.server.event_stream import EventStream, run_while_connected
from tokasaurus.server.json_body import JsonBodyRoute
from tokasaurus.server.openapi import BODY_ERRORS, answers, example_body
from tokasaurus.server.prepare.requests import Origin
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.state import num_body_bytes, state_of

router = APIRouter(route_class=JsonBodyRoute, tags=["generation"])

# For the OpenAPI page.
_ERRORS = (*BODY_ERRORS, 404, 429, 503)
# Content of a 200 response with stream=true.
_STREAMED = {"text/event-stream": {"schema": {"description": "Chunks as server-sent events."}}}


def _handler(endpoint: Endpoint[Body]) -> Callable[[Request, Body], Awaitable[Response]]:
    async def handle(request: Request, body: Body) -> Response:
        """Raises ApiError; ClientGone if the client disconnects, after the engine was told to cancel the request."""
        state = state_of(request)
        session = session_of(request) if state.model.rl else ""
        origin = Origin(num_body_bytes(request), client_of(request), session=session)
        if body.stream:
            prepared = await run_while_connected(request.receive, endpoint.prepare(state, body, origin))
            streamed = StreamedAnswer(endpoint, state, prepared, body.stream_options or StreamOptions())
            return EventStream(streamed.events(), streamed.failure)
        answer = await run_while_connected(request.receive, endpoint.answer(state, body, origin))
        return Response(answer.content, media_type="application/json")

    handle.__annotations__["body"] = endpoint.body_model  # the route reads it
    return handle


for _path, _endpoint in ALL_ENDPOINTS.items():
    router.add_api_route(
        _path,
        _handler(_endpoint),
        methods=["POST"],
        name=_endpoint.name,
        description=_endpoint.description,
        responses=answers(
            _endpoint.answer_model,
            *_ERRORS,
            content=None if _endpoint.stream is None else _STREAMED,
            errors=_endpoint.error_model,
        ),
        openapi_extra=example_body(_endpoint.example),
    )
