"""The way that every body takes that asks for text: prepare, generate, build; all of it ends if the client leaves."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from fastapi import Request, Response

from tokasaurus.messages.lifecycle import EngineLimits
from tokasaurus.server.disconnect import run_while_connected
from tokasaurus.server.engine_client.collectors import FinishedSequence, SequenceAborted
from tokasaurus.server.errors import GrammarTooComplex, InvalidRequest
from tokasaurus.server.openapi import BODY_ERRORS, error_responses
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.chat import ChatCompletion
from tokasaurus.server.protocol.completions import Completion
from tokasaurus.server.protocol.sampling_fields import SamplingFields, StreamOptions
from tokasaurus.server.respond.stream import AnswerStream
from tokasaurus.server.respond.whole import write_answer
from tokasaurus.server.routes.event_stream import EventStream
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import ServerState, state_of

Body = TypeVar("Body", bound=SamplingFields)

# For the OpenAPI page.
ERROR_RESPONSES = error_responses(*BODY_ERRORS, 404, 429, 503)
# Of an answer's 200: what it is with stream=true.
STREAMED = {"text/event-stream": {"schema": {"description": "Chunks as server-sent events."}}}

# What a stream makes of so many deltas is sent before other work has its turn: some milliseconds.
MAX_DELTAS_AT_ONCE = 64


async def answer_generation(
    request: Request,
    body: Body,
    prepare: Callable[[Body, ServedModel, EngineLimits], Prepared],
    build: Callable[[Prepared, list[list[FinishedSequence]], ServedModel], Completion | ChatCompletion],
    stream: Callable[[Prepared, ServedModel, StreamOptions], AnswerStream],
) -> Response:
    """build: the whole answer. stream: its events, where the body asks for those.

    Raises ApiError; ClientGone when the client disconnects, after the engine was told to drop the request."""
    state = state_of(request)
    if body.stream:
        prepared = await run_while_connected(request.receive, _prepare(state, body, prepare))
        answer = stream(prepared, state.model, body.stream_options or StreamOptions())
        return EventStream(_events(state, prepared, answer))
    work = generate_answer(state, body, prepare, build)
    return Response(await run_while_connected(request.receive, work), media_type="application/json")


async def generate_answer(
    state: ServerState,
    body: Body,
    prepare: Callable[[Body, ServedModel, EngineLimits], Prepared],
    build: Callable[[Prepared, list[list[FinishedSequence]], ServedModel], Completion | ChatCompletion],
) -> bytes:
    """The whole answer, as JSON. If the caller is cancelled, the engine is told. Raises ApiError."""
    prepared = await _prepare(state, body, prepare)
    with _blaming_grammar(prepared):
        results = await state.engine.generate(prepared.requests)
    return await state.in_text_thread(lambda: write_answer(build(prepared, results, state.model)))


async def _prepare(
    state: ServerState, body: Body, prepare: Callable[[Body, ServedModel, EngineLimits], Prepared]
) -> Prepared:
    """With the grammar checked and in the requests. Raises ApiError."""
    prepared = await state.in_text_thread(prepare, body, state.model, _checked_limits(state, body))
    if prepared.grammar is None:
        return prepared
    grammar = await state.grammars.check(prepared.grammar)
    return replace(prepared, requests=[replace(request, grammar=grammar) for request in prepared.requests])


def _checked_limits(state: ServerState, body: SamplingFields) -> EngineLimits:
    """What costs nothing to refuse. Raises ApiError."""
    state.model.check_name(body.model)
    limits = state.ready_limits()
    state.engine.check_queue()  # it is checked again when the request is submitted, but this spares the work until then
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options goes with stream=true", "stream_options")
    return limits


@contextmanager
def _blaming_grammar(prepared: Prepared) -> Iterator[None]:
    """A sequence that is given up inside is an error of the field that gave the grammar."""
    try:
        yield
    except SequenceAborted as error:
        assert prepared.grammar is not None, "grammars alone are given up"
        param = prepared.grammar.param
        raise GrammarTooComplex(f"{param}: {error}", param) from None


async def _events(state: ServerState, prepared: Prepared, answer: AnswerStream) -> AsyncGenerator[bytes, None]:
    """The engine is told to drop the requests if this is closed before its end."""
    with _blaming_grammar(prepared), state.engine.stream(prepared.requests) as collector:
        while deltas := await collector.read():
            for start in range(0, len(deltas), MAX_DELTAS_AT_ONCE):
                part = deltas[start : start + MAX_DELTAS_AT_ONCE]
                if answer.shows_prompts(part):  # which may be long
                    events = await state.in_text_thread(answer.events, part)
                else:
                    events = answer.events(part)
                if events:
                    yield events
    yield answer.end()
