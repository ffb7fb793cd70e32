"""Routes that generate text: whole and streamed answers, cancelled if the client disconnects."""

from fastapi import APIRouter, Request, Response

from tokasaurus.server.access import client_of, session_of
from tokasaurus.server.endpoints import ENDPOINTS, Body, Endpoint, StreamedAnswer
from tokasaurus.server.errors import ResponseNotStored
from tokasaurus.server.openapi import BODY_ERRORS, Responses, error_responses
from tokasaurus.server.prepare.messages import count_prompt_tokens
from tokasaurus.server.prepare.requests import Origin
from tokasaurus.server.protocol.chat import ChatCompletion, ChatCompletionRequest
from tokasaurus.server.protocol.completions import Completion, CompletionRequest
from tokasaurus.server.protocol.messages import (
    CountTokensRequest,
    MessageObject,
    MessagesError,
    MessagesRequest,
    TokenCount,
)
from tokasaurus.server.protocol.responses import ResponseObject, ResponsesRequest
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.routes.event_stream import EventStream, run_while_connected
from tokasaurus.server.routes.json_body import JsonBodyRoute
from tokasaurus.server.state import num_body_bytes, state_of
from tokasaurus.text.json_lines import write_json

router = APIRouter(route_class=JsonBodyRoute, tags=["generation"])

# For the OpenAPI page.
_ERROR_RESPONSES = error_responses(*BODY_ERRORS, 404, 429, 503)
# Content of a 200 response with stream=true.
_STREAMED = {"text/event-stream": {"schema": {"description": "Chunks as server-sent events."}}}


@router.post("/v1/completions", responses={200: {"model": Completion, "content": _STREAMED}, **_ERROR_RESPONSES})
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue one or more prompts, each `n` times."""
    return await _answer(request, body, ENDPOINTS["/v1/completions"])


@router.post(
    "/v1/chat/completions", responses={200: {"model": ChatCompletion, "content": _STREAMED}, **_ERROR_RESPONSES}
)
async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Generate `n` answers to a conversation, formatted with the model's chat template."""
    return await _answer(request, body, ENDPOINTS["/v1/chat/completions"])


@router.post("/v1/responses", responses={200: {"model": ResponseObject, "content": _STREAMED}, **_ERROR_RESPONSES})
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer a conversation given as items. Nothing is stored."""
    return await _answer(request, body, ENDPOINTS["/v1/responses"])


# Anthropic's form; statuses as of the other routes.
_MESSAGES_ERRORS: Responses = {
    status: {"model": MessagesError, "description": content["description"]}
    for status, content in _ERROR_RESPONSES.items()
}


@router.post("/v1/messages", responses={200: {"model": MessageObject, "content": _STREAMED}, **_MESSAGES_ERRORS})
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation given in Anthropic's form."""
    return await _answer(request, body, ENDPOINTS["/v1/messages"])


@router.post("/v1/messages/count_tokens", responses={200: {"model": TokenCount}, **_MESSAGES_ERRORS})
async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    """The tokens of the prompt that a message with these fields has."""
    state = state_of(request)
    state.model.check_name(body.model)
    state.ready_limits()
    max_chars = state.config.max_tokenize_chars
    run = state.text_threads.run_apart if body.chat_template else state.text_threads.run
    count = await run(num_body_bytes(request), count_prompt_tokens, body, state.model, max_chars)
    return Response(write_json(TokenCount(count)), media_type="application/json")


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
