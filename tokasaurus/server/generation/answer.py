"""The common path of live requests and lines of batches: prepare, generate, build."""

import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from tokasaurus.messages.lifecycle import EngineLimits
from tokasaurus.server.access import add_key_salt
from tokasaurus.server.engine_client.collectors import (
    VALUES_PER_DELTA,
    AnswerTooLarge,
    FinishedSequence,
    SequenceAborted,
)
from tokasaurus.server.errors import AnswerTooLargeError, GrammarTooComplex, InvalidRequest, NumericalError
from tokasaurus.server.prepare.requests import Origin, Prepared, num_prompt_values
from tokasaurus.server.protocol.chat import ChatCompletion
from tokasaurus.server.protocol.completions import Completion
from tokasaurus.server.protocol.sampling_fields import SamplingFields
from tokasaurus.server.protocol.usage import Usage
from tokasaurus.server.resources.limits import RequestLimits
from tokasaurus.server.resources.text_threads import TextThreads
from tokasaurus.server.respond.whole import write_answer
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import ServerState
from tokasaurus.server.structured_output.validator import GrammarChecker

Body = TypeVar("Body", bound=SamplingFields)
Prepare = Callable[[Body, ServedModel, EngineLimits, GrammarChecker, TextThreads, Origin], Awaitable[Prepared]]
"""A function of server.prepare.requests."""
Build = Callable[[Prepared, list[list[FinishedSequence]], ServedModel], Completion | ChatCompletion]
"""A function of server.respond.whole."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole response to a body."""

    content: bytes
    """JSON."""
    usage: Usage


async def generate_answer(
    state: ServerState,
    body: Body,
    origin: Origin,
    prepare: Prepare[Body],
    build: Build,
) -> Answer:
    """Prepare, generate and build. If the caller is cancelled, so is the request in the engine. Raises ApiError."""
    prepared = await prepare_checked(state, body, origin, prepare)
    with raising_api_errors(prepared):
        results = await state.engine.generate(prepared.requests, state.limits.max_answer_values)
    size = sum(sequence.num_values + VALUES_PER_DELTA for row in results for sequence in row)
    size += num_prompt_values(prepared)

    def write() -> Answer:
        answer = build(prepared, results, state.model)
        return Answer(write_answer(answer), answer.usage)

    return await state.text_threads.run(size, write)


async def prepare_checked(state: ServerState, body: Body, origin: Origin, prepare: Prepare[Body]) -> Prepared:
    """The requests of a body, after the checks that cost nothing. Raises ApiError."""
    limits = _checked_limits(state, body, origin)
    prepared = await prepare(body, state.model, limits, state.grammars, state.text_threads, origin)
    return dataclasses.replace(prepared, requests=add_key_salt(prepared.requests))


def _checked_limits(state: ServerState, body: SamplingFields, origin: Origin) -> EngineLimits:
    state.model.check_name(body.model)
    limits = state.ready_limits()
    if not origin.is_background:
        state.engine.check_queue(origin.client, body.n)  # checked again at submission; this saves the work before it
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
def raising_api_errors(prepared: Prepared) -> Iterator[None]:
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
