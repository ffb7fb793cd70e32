"""Routes that generate text: whole and streamed answers, cancelled if the client disconnects."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.access import client_of, session_of
from tokasaurus.server.endpoints import CHAT_EXAMPLE, ENDPOINTS, Body, Endpoint, StreamedAnswer
from tokasaurus.server.errors import ResponseNotStored
from tokasaurus.server.openapi import BODY_ERRORS, error_responses, example_body
from tokasaurus.server.prepare.messages import count_prompt_tokens
from tokasaurus.server.prepare.requests import Origin
from tokasaurus.server.prepare.responses import count_input_tokens
from tokasaurus.server.protocol.chat_forms import ChatForm
from tokasaurus.server.protocol.messages import CountTokensRequest, MessagesError, TokenCount
from tokasaurus.server.protocol.responses import CountInputRequest, InputTokens
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.routes.event_stream import EventStream, run_while_connected
from tokasaurus.server.routes.json_body import JsonBodyRoute
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import num_body_bytes, state_of
from tokasaurus.text.json_lines import write_json

Form = TypeVar("Form", bound=ChatForm)

router = APIRouter(route_class=JsonBodyRoute, tags=["generation"])

# For the OpenAPI page.
_ERRORS = (*BODY_ERRORS, 404, 429, 503)
# Content of a 200 response with stream=true.
_STREAMED = {"text/event-stream": {"schema": {"description": "Chunks as server-sent events."}}}


def _handler(endpoint: Endpoint[Body]) -> Callable[[Request, Body], Awaitable[Response]]:
    async def handle(request: Request, body: Body) -> Response:
        return await _answer(request, body, endpoint)

    handle.__annotations__["body"] = endpoint.body_model  # the route reads it
    return handle


for _path, _endpoint in ENDPOINTS.items():
    router.add_api_route(
        _path,
        _handler(_endpoint),
        methods=["POST"],
        name=_endpoint.name,
        description=_endpoint.description,
        responses={
            200: {"model": _endpoint.answer_model, "content": _STREAMED},
            **error_responses(*_ERRORS, model=_endpoint.error_model),
        },
        openapi_extra=example_body(_endpoint.example),
    )


@router.post(
    "/v1/messages/count_tokens",
    responses={200: {"model": TokenCount}, **error_responses(*_ERRORS, model=MessagesError)},
    openapi_extra=example_body({"messages": CHAT_EXAMPLE["messages"]}),
)
async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    """The tokens of the prompt that a message with these fields has."""
    count = await _counted(request, body, count_prompt_tokens)
    return Response(write_json(TokenCount(count)), media_type="application/json")


@router.post(
    "/v1/responses/input_tokens",
    responses={200: {"model": InputTokens}, **error_responses(*_ERRORS)},
    openapi_extra=example_body({"input": "What do whales eat?"}),
)
async def input_tokens(request: Request, body: CountInputRequest) -> Response:
    """The tokens of the prompt that a response with these fields has."""
    count = await _counted(request, body, count_input_tokens)
    return Response(write_json(InputTokens(count)), media_type="application/json")


async def _counted(request: Request, body: Form, count: Callable[[Form, ServedModel, EngineLimits, int], int]) -> int:
    """What `count` returns. Raises ApiError."""
    state = state_of(request)
    state.model.check_name(body.model)
    limits, max_chars = state.ready_limits(), state.config.max_tokenize_chars
    run = state.text_threads.run_apart if body.chat_template else state.text_threads.run
    return await run(num_body_bytes(request), count, body, state.model, limits, max_chars)


_NOTHING_STORED = {**error_responses(404)}


@router.get("/v1/responses/{response_id}", summary="Retrieve Response", responses=_NOTHING_STORED)
@router.delete("/v1/responses/{response_id}", summary="Delete Response", responses=_NOTHING_STORED)
@router.post("/v1/responses/{response_id}/cancel", summary="Cancel Response", responses=_NOTHING_STORED)
@router.get("/v1/responses/{response_id}/input_items", summary="List Input Items", responses=_NOTHING_STORED)
async def find_response(response_id: str) -> Response:
    """There is none: responses are not stored."""
    raise ResponseNotStored(response_id)


async def _answer(request: Request, body: Body, endpoint: Endpoint[Body]) -> Response:
    """The response to `body`, streamed if it has stream=true.

    Raises ApiError; ClientGone if the client disconnects, after the engine was told to cancel the request."""
    state = state_of(request)
    origin = Origin(num_body_bytes(request), client_of(request), session=session_of(request) if state.model.rl else "")
    if body.stream:
        prepared = await run_while_connected(request.receive, endpoint.prepare(state, body, origin))
        streamed = StreamedAnswer(endpoint, state, prepared, body.stream_options or StreamOptions())
        return EventStream(streamed.events(), streamed.failure)
    answer = await run_while_connected(request.receive, endpoint.answer(state, body, origin))
    return Response(answer.content, media_type="application/json")
