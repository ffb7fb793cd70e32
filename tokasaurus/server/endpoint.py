"""How an endpoint generates text: prepare, generate, build or stream; the same for live requests and for lines."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

from fastapi import Request

from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.engine_client.collectors import (
    VALUES_PER_DELTA,
    AnswerTooLarge,
    FinishedSequence,
    SequenceAborted,
)
from tokasaurus.server.errors import (
    AnswerTooLargeError,
    ApiError,
    ErrorResponse,
    GrammarTooComplex,
    InvalidRequest,
    NumericalError,
    RequestAborted,
)
from tokasaurus.server.prepare.chat import chat_of, count_chat_tokens
from tokasaurus.server.prepare.field_table import FieldTable
from tokasaurus.server.prepare.requests import Draft, Origin, Prepared, num_prompt_values
from tokasaurus.server.protocol.chat import ChatForm, TemplateFields
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.stream import AnswerEvents
from tokasaurus.server.respond.whole import Answer, WholeAnswer, write_answer
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import ServerState, num_body_bytes, state_of


class AskedBody(Protocol):
    """What the common path reads of a body."""

    @property
    def model(self) -> str | None: ...

    @property
    def stream(self) -> bool: ...

    @property
    def stream_options(self) -> StreamOptions | None: ...

    @property
    def stops(self) -> tuple[tuple[str, ...], str]: ...

    @property
    def num_sequences(self) -> int: ...


Body = TypeVar("Body", bound=AskedBody)
Form = TypeVar("Form", bound=ChatForm)

# Values turned into events before other tasks may run: a few milliseconds of work.
MAX_VALUES_AT_ONCE = 2048
MAX_FIRST_CHOICES = 256


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Body]):
    """How bodies become requests, and their sequences an answer."""

    body_model: type[Body]
    draft: Callable[[Body, ServedModel, EngineLimits, Origin], Draft]
    build: Callable[[Prepared, Sequence[Sequence[FinishedSequence]], ServedModel], WholeAnswer | Answer]
    """Builds the whole answer, or writes it."""
    stream: Callable[[Prepared, ServedModel, StreamOptions], AnswerEvents] | None
    """Makes what turns deltas into the events of a streamed answer; None: no body asks for one."""
    renders_template: bool
    """Whether a draft runs the model's chat template."""
    tasks: frozenset[str] = frozenset(("generate",))
    """What the model must do, by the flag task."""

    async def prepare(self, state: ServerState, body: Body, origin: Origin) -> Prepared:
        """The final requests of a body. Checks that cost nothing come first. Raises ApiError."""
        state.model.check_task(self.tasks)
        adapter = state.adapter_for(body.model)
        limits = _checked_limits(state, body, origin)
        origin = replace(origin, adapter=adapter)

        def draft_body() -> Draft:
            return self.draft(body, state.model, limits, origin)

        threads = state.text_threads
        if isinstance(body, TemplateFields) and body.chat_template:
            draft = await threads.run_apart(origin.num_bytes, draft_body)
        else:
            run = threads.run if self.renders_template else threads.run_short
            draft = await run(origin.num_bytes, draft_body)
        prepared = draft.prepared
        if draft.grammar is not None:
            prepared = draft.with_grammar(await state.grammars.check(draft.grammar))
        newest = state.adapter_for(body.model)  # another one may have the name by now
        return prepared if newest is adapter else prepared.by(newest)

    async def answer(self, state: ServerState, body: Body, origin: Origin) -> Answer:
        """Prepare, generate and build. If the caller is cancelled, so is the request in the engine. Raises ApiError."""
        return await self.answer_prepared(state, await self.prepare(state, body, origin))

    async def answer_prepared(self, state: ServerState, prepared: Prepared) -> Answer:
        """Generate and build the answer of a prepared body. If the caller is cancelled, so is the request in the
        engine.

        Raises ApiError."""
        return await self.write(state, prepared, await self.generate(state, prepared))

    async def generate(self, state: ServerState, prepared: Prepared) -> list[list[FinishedSequence]]:
        """The sequences of each request of a prepared body. If the caller is cancelled, so is the request in the
        engine. Raises ApiError."""
        with _raising_api_errors(prepared):
            return await state.engine.generate(prepared.requests, state.config.max_answer_values)

    async def write(
        self, state: ServerState, prepared: Prepared, results: Sequence[Sequence[FinishedSequence]]
    ) -> Answer:
        """The answer. results: of `generate`."""
        size = sum(sequence.num_values + VALUES_PER_DELTA for row in results for sequence in row)
        size += num_prompt_values(prepared)

        def write() -> Answer:
            answer = self.build(prepared, results, state.model)
            if isinstance(answer, Answer):
                return answer
            return Answer(write_answer(answer, results, state.model.rl, prepared.experts_from), answer.usage)

        return await state.text_threads.run_short(size, write)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedEndpoint(Endpoint[Body]):
    """An endpoint with a route of its own, for single requests and lines."""

    name: str
    """Name of the operation on the OpenAPI page, in the form of a function's name."""
    description: str
    operation: Literal["chat", "text_completion", "embeddings"]
    """gen_ai.operation.name in the spans of its requests."""
    answer_model: type
    error_model: type = ErrorResponse
    example: Mapping[str, object]
    """A body that it accepts, which the OpenAPI page offers to send."""


class StreamedAnswer:
    """The events of one stream, and how it tells that it failed."""

    def __init__(self, endpoint: Endpoint[Any], state: ServerState, prepared: Prepared, options: StreamOptions) -> None:
        self._state = state
        self._prepared = prepared
        assert endpoint.stream is not None, "a body asked for a stream"
        self._make = functools.partial(endpoint.stream, prepared, state.model, options)
        self._answer = self._make()

    def failure(self, error: ApiError) -> bytes:
        """The last events, if `events` raised the error after it had yielded some."""
        return self._answer.failure(error)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events. If closed before its end, the requests are cancelled in the engine. Raises ApiError."""
        state, prepared = self._state, self._prepared
        num_values = num_prompt_values(prepared)
        answer = self._answer
        with _raising_api_errors(prepared):
            async with state.engine.stream(prepared.requests) as collector:
                while deltas := await collector.read(MAX_VALUES_AT_ONCE):
                    if collector.begins_anew:
                        answer = self._answer = self._make()
                    while answer.num_unsent_first > MAX_FIRST_CHOICES:
                        collector.note_sent()
                        if answer.shows_prompts(deltas):  # prompts may be long
                            yield await state.text_threads.run(num_values, answer.first_events, MAX_FIRST_CHOICES)
                        else:
                            yield answer.first_events(MAX_FIRST_CHOICES)
                    if answer.shows_prompts(deltas):
                        events = await state.text_threads.run(num_values, answer.events, deltas)
                    else:
                        events = answer.events(deltas)
                    if events:
                        collector.note_sent()
                        yield events  # the reader lets other tasks run
                    else:
                        collector.note_nothing_sent()
                        await asyncio.sleep(0)
        if last := answer.end():
            yield last


def _checked_limits(state: ServerState, body: AskedBody, origin: Origin) -> EngineLimits:
    limits = state.ready_limits()
    state.engine.control.check_awake()
    if not origin.is_background:  # checked again at submission; this saves the work before it
        state.engine.check_queue(origin.client, body.num_sequences)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options goes with stream=true", "stream_options")
    _check_stops(*body.stops, state.config)
    return limits


def _check_stops(stops: Sequence[str], param: str, config: ServerConfig) -> None:
    if len(stops) > config.max_stop_strings:
        raise InvalidRequest(f"{param} may have at most {config.max_stop_strings} strings", param)
    longest = max(map(len, stops), default=0)
    if longest > config.max_stop_chars:
        raise InvalidRequest(
            f"{param} has a string of {longest} characters: there may be at most {config.max_stop_chars}", param
        )


async def count_prompt_tokens(request: Request, form: Form, fields: FieldTable[Form]) -> int:
    """Tokens of the prompt that a body of another form of chat has. fields: of the chat body. Raises ApiError."""
    state = state_of(request)
    state.adapter_for(form.model)
    limits, max_chars = state.ready_limits(), state.config.max_tokenize_chars

    def count() -> int:
        with fields.naming():
            return count_chat_tokens(chat_of(form, fields.values(form)), state.model, limits, max_chars)

    run = state.text_threads.run_apart if form.chat_template else state.text_threads.run
    return await run(num_body_bytes(request), count)


@contextmanager
def _raising_api_errors(prepared: Prepared) -> Iterator[None]:
    """Turns SequenceAborted into NumericalError, RequestAborted, or GrammarTooComplex for the field that contained the
    grammar."""
    try:
        yield
    except SequenceAborted as error:
        if error.code == "numerical_error":
            raise NumericalError(str(error)) from None
        if error.code == "aborted":
            raise RequestAborted(f"the request was {error}: send it again") from None
        param = prepared.grammar_param
        assert param is not None, "the sequence has a grammar"
        raise GrammarTooComplex(f"{param}: {error}", param) from None
    except AnswerTooLarge as error:
        raise AnswerTooLargeError(
            f"{error}, its tokens and log-probabilities together; with stream=true there is no such limit"
        ) from None
