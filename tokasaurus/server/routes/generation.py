"""The common path of generation requests: prepare, generate, build; cancelled if the client disconnects."""

import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TypeVar

from fastapi import Request, Response

from tokasaurus.messages.lifecycle import EngineLimits
from tokasaurus.server.client_identity import add_key_salt
from tokasaurus.server.disconnect import run_while_connected
from tokasaurus.server.engine_client.collectors import FinishedSequence, SequenceAborted
from tokasaurus.server.errors import GrammarTooComplex, InvalidRequest, NumericalError
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
from tokasaurus.server.structured_output.validator import GrammarChecker

Body = TypeVar("Body", bound=SamplingFields)
# A function of server.prepare.body and one of server.respond.whole.
Prepare = Callable[[Body, ServedModel, EngineLimits, GrammarChecker, Executor], Awaitable[Prepared]]
Build = Callable[[Prepared, list[list[FinishedSequence]], ServedModel], Completion | ChatCompletion]

# For the OpenAPI page.
ERROR_RESPONSES = error_responses(*BODY_ERRORS, 404, 429, 503)
# Content of a 200 response with stream=true.
STREAMED = {"text/event-stream": {"schema": {"description": "Chunks as server-sent events."}}}

# Deltas turned into events before other tasks may run: a few milliseconds of work.
MAX_DELTAS_AT_ONCE = 64


async def answer_generation(
    request: Request,
    body: Body,
    prepare: Prepare[Body],
    build: Build,
    stream: Callable[[Prepared, ServedModel, StreamOptions], AnswerStream],
) -> Response:
    """The response to `body`: built by `build`, or by `stream` if the body has stream=true.

    Raises ApiError; ClientGone if the client disconnects, after the engine was told to cancel the request."""
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
    prepare: Prepare[Body],
    build: Build,
) -> bytes:
    """The whole response as JSON. If the caller is cancelled, so is the request in the engine. Raises ApiError."""
    prepared = await _prepare(state, body, prepare)
    with _raising_api_errors(prepared):
        results = await state.engine.generate(prepared.requests)
    return await state.in_text_thread(lambda: write_answer(build(prepared, results, state.model)))


async def _prepare(state: ServerState, body: Body, prepare: Prepare[Body]) -> Prepared:
    limits = _checked_limits(state, body)
    prepared = await prepare(body, state.model, limits, state.grammars, state.text_threads)
    return dataclasses.replace(prepared, requests=add_key_salt(prepared.requests))


def _checked_limits(state: ServerState, body: SamplingFields) -> EngineLimits:
    """The engine's limits, after the checks that cost nothing. Raises ApiError."""
    state.model.check_name(body.model)
    limits = state.ready_limits()
    state.engine.check_queue()  # checked again at submission; this saves the work before it
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options goes with stream=true", "stream_options")
    return limits


@contextmanager
def _raising_api_errors(prepared: Prepared) -> Iterator[None]:
    """Turns SequenceAborted into NumericalError, or GrammarTooComplex for the field that contained the grammar."""
    try:
        yield
    except SequenceAborted as error:
        if error.code == "numerical_error":
            raise NumericalError(str(error)) from None
        param = prepared.grammar_param
        assert param is not None, "the sequence has a grammar"
        raise GrammarTooComplex(f"{param}: {error}", param) from None


async def _events(state: ServerState, prepared: Prepared, answer: AnswerStream) -> AsyncGenerator[bytes, None]:
    """The events of a stream. If closed before its end, the requests are cancelled in the engine."""
    with _raising_api_errors(prepared), state.engine.stream(prepared.requests) as collector:
        while deltas := await collector.read():
            for start in range(0, len(deltas), MAX_DELTAS_AT_ONCE):
                part = deltas[start : start + MAX_DELTAS_AT_ONCE]
                if answer.shows_prompts(part):  # prompts may be long
                    events = await state.in_text_thread(answer.events, part)
                else:
                    events = answer.events(part)
                if events:
                    yield events
    yield answer.end()
