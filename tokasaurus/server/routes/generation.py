"""POST /v1/completions and /v1/chat/completions: whole and streamed answers, cancelled if the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from fastapi import APIRouter, Request, Response

from tokasaurus.messages.generation import SequenceDelta
from tokasaurus.server.access import client_of
from tokasaurus.server.disconnect import run_while_connected
from tokasaurus.server.generation.answer import (
    Body,
    Build,
    Prepare,
    generate_answer,
    prepare_checked,
    raising_api_errors,
)
from tokasaurus.server.openapi import BODY_ERRORS, error_responses
from tokasaurus.server.prepare.requests import Origin, Prepared, num_prompt_values, prepare_chat, prepare_completion
from tokasaurus.server.protocol.chat import ChatCompletion, ChatCompletionRequest
from tokasaurus.server.protocol.completions import Completion, CompletionRequest
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.stream import AnswerStream, ChatStream, CompletionStream
from tokasaurus.server.respond.whole import build_chat_completion, build_completion
from tokasaurus.server.routes.event_stream import EventStream
from tokasaurus.server.routes.json_body import JsonBodyRoute
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import ServerState, num_body_bytes, state_of

router = APIRouter(route_class=JsonBodyRoute, tags=["generation"])

# For the OpenAPI page.
_ERROR_RESPONSES = error_responses(*BODY_ERRORS, 404, 429, 503)
# Content of a 200 response with stream=true.
_STREAMED = {"text/event-stream": {"schema": {"description": "Chunks as server-sent events."}}}

# Values turned into events before other tasks may run: a few milliseconds of work.
MAX_VALUES_AT_ONCE = 2048
MAX_FIRST_CHOICES = 256


@router.post("/v1/completions", responses={200: {"model": Completion, "content": _STREAMED}, **_ERROR_RESPONSES})
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue one or more prompts, each `n` times."""
    return await _answer_generation(request, body, prepare_completion, build_completion, CompletionStream)


@router.post(
    "/v1/chat/completions", responses={200: {"model": ChatCompletion, "content": _STREAMED}, **_ERROR_RESPONSES}
)
async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Generate `n` answers to a conversation, formatted with the model's chat template."""
    return await _answer_generation(request, body, prepare_chat, build_chat_completion, ChatStream)


async def _answer_generation(
    request: Request,
    body: Body,
    prepare: Prepare[Body],
    build: Build,
    stream: Callable[[Prepared, ServedModel, StreamOptions], AnswerStream],
) -> Response:
    """The response to `body`: built by `build`, or by `stream` if the body has stream=true.

    Raises ApiError; ClientGone if the client disconnects, after the engine was told to cancel the request."""
    state, origin = state_of(request), Origin(num_body_bytes(request), client_of(request))
    if body.stream:
        prepared = await run_while_connected(request.receive, prepare_checked(state, body, origin, prepare))
        options = body.stream_options or StreamOptions()
        return EventStream(_events(state, prepared, lambda: stream(prepared, state.model, options)))
    work = generate_answer(state, body, origin, prepare, build)
    answer = await run_while_connected(request.receive, work)
    return Response(answer.content, media_type="application/json")


async def _events(
    state: ServerState, prepared: Prepared, make_answer: Callable[[], AnswerStream]
) -> AsyncGenerator[bytes, None]:
    """The events of a stream. If closed before its end, the requests are cancelled in the engine.

    Until the first event, the engine may run requests again whose first tokens have been read, but made no text yet.
    """
    num_values = num_prompt_values(prepared)
    answer, has_sent, unsent = make_answer(), False, list[tuple[int, SequenceDelta]]()
    with raising_api_errors(prepared):
        async with state.engine.stream(prepared.requests) as collector:
            while deltas := await collector.read(MAX_VALUES_AT_ONCE):
                if restarted := collector.take_restarted():
                    answer = make_answer()
                    deltas = [(index, delta) for index, delta in unsent if index not in restarted] + deltas
                    unsent.clear()
                while answer.num_unsent_first > MAX_FIRST_CHOICES:
                    if answer.shows_prompts(deltas):  # prompts may be long
                        yield await state.text_threads.run(num_values, answer.first_events, MAX_FIRST_CHOICES)
                    else:
                        yield answer.first_events(MAX_FIRST_CHOICES)
                    has_sent = True
                if answer.shows_prompts(deltas):
                    events = await state.text_threads.run(num_values, answer.events, deltas)
                else:
                    events = answer.events(deltas)
                if events:
                    has_sent = True
                    unsent.clear()
                    yield events  # the reader lets other tasks run
                    continue
                if not has_sent:
                    unsent += deltas
                    collector.note_nothing_sent()
                await asyncio.sleep(0)
    yield answer.end()
