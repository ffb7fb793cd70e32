"""The common path of generation requests: prepare, generate, build; cancelled if the client disconnects."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from fastapi import Request, Response

from tokasaurus.messages.lifecycle import EngineLimits
from tokasaurus.server.client_identity import add_key_salt, client_of
from tokasaurus.server.disconnect import run_while_connected
from tokasaurus.server.engine_client.collectors import (
    VALUES_PER_DELTA,
    AnswerTooLarge,
    FinishedSequence,
    SequenceAborted,
)
from tokasaurus.server.errors import AnswerTooLargeError, GrammarTooComplex, InvalidRequest, NumericalError
from tokasaurus.server.openapi import BODY_ERRORS, error_responses
from tokasaurus.server.prepare.body import Origin
from tokasaurus.server.prepare.requests import Prepared, num_prompt_values
from tokasaurus.server.protocol.chat import ChatCompletion
from tokasaurus.server.protocol.completions import Completion
from tokasaurus.server.protocol.sampling_fields import SamplingFields, StreamOptions
from tokasaurus.server.resources.limits import RequestLimits
from tokasaurus.server.resources.text_threads import TextThreads
from tokasaurus.server.respond.stream import AnswerStream
from tokasaurus.server.respond.whole import write_answer
from tokasaurus.server.routes.event_stream import EventStream
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import ServerState, num_body_bytes, state_of
from tokasaurus.server.structured_output.validator import GrammarChecker

Body = TypeVar("Body", bound=SamplingFields)
# A function of server.prepare.body and one of server.respond.whole.
Prepare = Callable[[Body, ServedModel, EngineLimits, GrammarChecker, TextThreads, Origin], Awaitable[Prepared]]
Build = Callable[[Prepared, list[list[FinishedSequence]], ServedModel], Completion | ChatCompletion]

# For the OpenAPI page.
ERROR_RESPONSES = error_responses(*BODY_ERRORS, 404, 429, 503)
# Content of a 200 response with stream=true.
STREAMED = {"text/event-stream": {"schema": {"description": "Chunks as server-sent events."}}}

# Values turned into events before other tasks may run: a few milliseconds of work.
MAX_VALUES_AT_ONCE = 2048
MAX_FIRST_CHOICES = 256


async def answer_generation(
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
        prepared = await run_while_connected(request.receive, _prepare(state, body, origin, prepare))
        answer = stream(prepared, state.model, body.stream_options or StreamOptions())
        return EventStream(_events(state, prepared, answer))
    work = generate_answer(state, body, origin, prepare, build)
    return Response(await run_while_connected(request.receive, work), media_type="application/json")


async def generate_answer(
    state: ServerState,
    body: Body,
    origin: Origin,
    prepare: Prepare[Body],
    build: Build,
) -> bytes:
    """The whole response as JSON. If the caller is cancelled, so is the request in the engine. Raises ApiError."""
    prepared = await _prepare(state, body, origin, prepare)
    with _raising_api_errors(prepared):
        results = await state.engine.generate(prepared.requests, state.limits.max_answer_values)
    size = sum(sequence.num_values + VALUES_PER_DELTA for row in results for sequence in row)
    size += num_prompt_values(prepared)
    return await state.text_threads.run(size, lambda: write_answer(build(prepared, results, state.model)))


async def _prepare(state: ServerState, body: Body, origin: Origin, prepare: Prepare[Body]) -> Prepared:
    limits = _checked_limits(state, body, origin.client)
    prepared = await prepare(body, state.model, limits, state.grammars, state.text_threads, origin)
    return dataclasses.replace(prepared, requests=add_key_salt(prepared.requests))


def _checked_limits(state: ServerState, body: SamplingFields, client: str) -> EngineLimits:
    """The engine's limits, after the checks that cost nothing. Raises ApiError."""
    state.model.check_name(body.model)
    limits = state.ready_limits()
    state.engine.check_queue(client, body.n)  # checked again at submission; this saves the work before it
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options goes with stream=true", "stream_options")
    _check_stops(body.stop, state.limits)
    return limits


def _check_stops(stops: Sequence[str], limits: RequestLimits) -> None:
    if len(stops) > limits.max_stop_strings:
        raise InvalidRequest(f"stop may have at most {limits.max_stop_strings} strings (max_stop_strings)", "stop")
    longest = max(map(len, stops), default=0)
    if longest > limits.max_stop_chars:
        raise InvalidRequest(
            f"stop has a string of {longest} characters: there may be at most {limits.max_stop_chars} (max_stop_chars)",
            "stop",
        )


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
    except AnswerTooLarge as error:
        raise AnswerTooLargeError(
            f"{error}, its tokens and log-probabilities together (max_answer_values); "
            "with stream=true there is no such limit"
        ) from None


async def _events(state: ServerState, prepared: Prepared, answer: AnswerStream) -> AsyncGenerator[bytes, None]:
    """The events of a stream. If closed before its end, the requests are cancelled in the engine."""
    num_values = num_prompt_values(prepared)
    with _raising_api_errors(prepared):
        async with state.engine.stream(prepared.requests) as collector:
            while deltas := await collector.read(MAX_VALUES_AT_ONCE):
                while answer.num_unsent_first > MAX_FIRST_CHOICES:
                    if answer.shows_prompts(deltas):  # prompts may be long
                        yield await state.text_threads.run(num_values, answer.first_events, MAX_FIRST_CHOICES)
                    else:
                        yield answer.first_events(MAX_FIRST_CHOICES)
                if answer.shows_prompts(deltas):
                    events = await state.text_threads.run(num_values, answer.events, deltas)
                else:
                    events = answer.events(deltas)
                if events:
                    yield events  # the reader lets other tasks run
                else:
                    await asyncio.sleep(0)
    yield answer.end()
