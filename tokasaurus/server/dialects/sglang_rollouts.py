"""Roll-outs by SGLang's names: text and tokens, pauses, new weights. Served with rl=T."""

import asyncio
import base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, PlainValidator

from tokasaurus import __version__
from tokasaurus.messages.generation import FinishReason, PromptLogprobs, SequenceDelta
from tokasaurus.server.access import client_of, session_of
from tokasaurus.server.endpoint import Endpoint, StreamedAnswer
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.engine_client.control import PauseMode
from tokasaurus.server.errors import Conflict, EngineNotReady, InvalidRequest
from tokasaurus.server.event_stream import EventStream, run_while_connected
from tokasaurus.server.json_body import JsonBodyRoute
from tokasaurus.server.openapi import BODY_ERRORS, answers, error_responses, example_body
from tokasaurus.server.prepare.completion import draft_completion
from tokasaurus.server.prepare.field_table import FieldTable
from tokasaurus.server.prepare.requests import Origin, Prepared
from tokasaurus.server.protocol.answers import Usage, WeightVersion
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.protocol.fields import (
    WHOLE_FLOATS,
    NullMeans,
    Only,
    OptionalObject,
    StrictObject,
    Text,
    TokenId,
    VersionName,
    parse_token_ids,
)
from tokasaurus.server.protocol.sampling_fields import CacheSalt, SamplingNumbers, Seed, StreamOptions
from tokasaurus.server.respond.choice import Choice, weight_spans
from tokasaurus.server.respond.logprobs import likely_tokens
from tokasaurus.server.respond.stream import AnswerStream, ChunkChoice
from tokasaurus.server.respond.whole import build_usage
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import ServerState, num_body_bytes, ready_state_of, state_of
from tokasaurus.text.json_lines import write_json
from tokasaurus.text.special_stops import find_special_stops
from tokasaurus.text.token_decoder import PROMPT_TAIL_TOKENS
from tokasaurus.workers import num_replicas

# Text: body
DEFAULT_NEW_TOKENS = 128


def _parse_input_ids(value: object) -> list[int] | None:
    return None if value is None else parse_token_ids(value)


InputIds = Annotated[
    list[int] | None,
    PlainValidator(_parse_input_ids, Annotated[list[TokenId], Field(min_length=1)] | None),
]


class TextSampling(SamplingNumbers):
    """SGLang's sampling parameters.

    max_new_tokens: of the completion, 128 if it is not given; null is all that the prompt leaves of max_model_len; 0
    with logprob_start_len scores the prompt alone. skip_special_tokens: leave special tokens out of the text.
    no_stop_trim: the text keeps the stop string or end token that ended it. sampling_seed: as seed elsewhere.
    Without effect, as for the tokenizers that are served: spaces_between_special_tokens.
    """

    max_new_tokens: Annotated[int | None, Field(ge=0), WHOLE_FLOATS] = DEFAULT_NEW_TOKENS
    min_new_tokens: Annotated[int, Field(ge=0), WHOLE_FLOATS, NullMeans(0)] = 0
    sampling_seed: Seed = None
    skip_special_tokens: Annotated[bool, NullMeans(True)] = True
    no_stop_trim: Annotated[bool, NullMeans(False)] = False
    spaces_between_special_tokens: bool | None = None

    n: Annotated[Any, Only(None, 1)] = None
    beam_width: Annotated[Any, Only(None, 1)] = None
    stop_regex: Annotated[Any, Only(None, [])] = None
    json_schema: Annotated[Any, Only(None, "")] = None
    regex: Annotated[Any, Only(None, "")] = None
    ebnf: Annotated[Any, Only(None, "")] = None
    structural_tag: Annotated[Any, Only(None, "")] = None
    stream_interval: Annotated[Any, Only(None)] = None
    custom_params: Annotated[Any, Only(None, {})] = None


class GenerateRequest(StrictObject):
    """One prompt: either text or input_ids.

    lora_path: the name of an adapter, in place of model. rid: a name for /abort_request, returned as meta_info.id; null
    draws one. session_id: as the header X-Session-ID.
    return_logprob: of each sampled token; with logprob_start_len also of the prompt's tokens from there on, -1: of
    none. top_logprobs_num: and this many most likely tokens. return_text_in_logprobs: with the tokens' texts.
    return_prompt_token_ids: also return the prompt's tokens. return_routed_experts: meta_info.routed_experts has the
    experts of all tokens but the last, or from number routed_experts_start_len on: base64 of int32 [tokens, layers,
    experts of a token], at the stream's end.
    stream: events whose text and tokens are all until then.

    Accepted without effect, since they do not concern the answer: log_metrics, no_logs, conversation_id.
    """

    text: Text | None = None
    input_ids: InputIds = None
    sampling_params: Annotated[TextSampling, NullMeans(TextSampling())] = Field(default_factory=TextSampling)
    model: str | None = None
    lora_path: Text | None = None
    rid: Text | None = None
    session_id: str | None = None
    return_logprob: Annotated[bool, NullMeans(False)] = False
    logprob_start_len: Annotated[int, Field(ge=-1), WHOLE_FLOATS, NullMeans(-1)] = -1
    top_logprobs_num: Annotated[int, Field(ge=0), WHOLE_FLOATS, NullMeans(0)] = 0
    return_text_in_logprobs: Annotated[bool, NullMeans(False)] = False
    return_prompt_token_ids: Annotated[bool, NullMeans(False)] = False
    return_routed_experts: Annotated[bool, NullMeans(False)] = False
    routed_experts_start_len: Annotated[int, Field(ge=0), WHOLE_FLOATS, NullMeans(0)] = 0
    stream: Annotated[bool, NullMeans(False)] = False
    cache_salt: CacheSalt = ""

    log_metrics: bool | None = None
    no_logs: bool | None = None
    conversation_id: str | None = None

    priority: Annotated[Any, Only(None, 0)] = None
    extra_key: Annotated[Any, Only(None, "")] = None
    image_data: Annotated[Any, Only(None, [])] = None
    video_data: Annotated[Any, Only(None, [])] = None
    audio_data: Annotated[Any, Only(None, [])] = None
    input_embeds: Annotated[Any, Only(None)] = None
    modalities: Annotated[Any, Only(None, [])] = None
    token_ids_logprob: Annotated[Any, Only(None, [])] = None
    return_hidden_states: Annotated[Any, Only(None, False)] = None
    return_sampling_mask: Annotated[Any, Only(None, False)] = None
    return_entropy: Annotated[Any, Only(None, False)] = None
    custom_logit_processor: Annotated[Any, Only(None)] = None
    session_params: Annotated[Any, Only(None)] = None
    data_parallel_rank: Annotated[Any, Only(None)] = None
    routed_dp_rank: Annotated[Any, Only(None)] = None
    background: Annotated[Any, Only(None, False)] = None


# Preparation
def _fields(body: GenerateRequest) -> FieldTable[GenerateRequest]:
    """Fields of the completions body that `body` becomes."""
    return _FIELDS[
        "text" if body.input_ids is None else "input_ids", "model" if body.lora_path is None else "lora_path"
    ]


_FIELDS = {
    (prompt, model): FieldTable[GenerateRequest](
        model=model,
        prompt=(prompt, lambda body: [body.input_ids if body.text is None else body.text]),
        cache_salt="cache_salt",
        stream="stream",
        return_token_ids="return_prompt_token_ids",
        return_routed_experts="return_routed_experts",
        routed_experts_prompt_start=(
            "routed_experts_start_len",
            lambda body: body.routed_experts_start_len if body.return_routed_experts else None,
        ),
        skip_special_tokens="sampling_params.skip_special_tokens",
        no_stop_trim="sampling_params.no_stop_trim",
        **{name: f"sampling_params.{name}" for name in SamplingNumbers.model_fields},
        max_tokens=("sampling_params.max_new_tokens", lambda body: _asked_tokens(body.sampling_params)),
        min_tokens="sampling_params.min_new_tokens",
        seed="sampling_params.sampling_seed",
        logprobs=("top_logprobs_num", lambda body: body.top_logprobs_num if body.return_logprob else None),
        prompt_logprobs=(
            "logprob_start_len",
            lambda body: body.top_logprobs_num if body.logprob_start_len >= 0 else None,
        ),
    )
    for prompt in ("text", "input_ids")
    for model in ("model", "lora_path")
}


def _asked_tokens(sampling: TextSampling) -> int | None:
    """Most new tokens, if the body has a number."""
    return sampling.max_new_tokens if "max_new_tokens" in sampling.model_fields_set else None


def completion_of_generate(body: GenerateRequest) -> CompletionRequest:
    """Validated already, as `body` is. Raises InvalidRequest."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("just one of text and input_ids is needed", "input_ids")
    if body.lora_path is not None and body.model not in (None, "", body.lora_path):
        raise InvalidRequest("model and lora_path: only one of them may be given", "lora_path")
    if not body.return_logprob:
        for name, neutral in (("logprob_start_len", -1), ("top_logprobs_num", 0), ("return_text_in_logprobs", False)):
            if getattr(body, name) != neutral:
                raise InvalidRequest(f"{name} goes with return_logprob=true", name)
    scores_prompt = body.logprob_start_len >= 0
    if scores_prompt and body.stream:
        raise InvalidRequest("logprob_start_len cannot be streamed", "logprob_start_len")
    sampling = body.sampling_params
    if sampling.max_new_tokens == 0 and not scores_prompt:
        name = "sampling_params.max_new_tokens"
        raise InvalidRequest(f"{name} may be 0 only to score the prompt, with logprob_start_len", name)
    return CompletionRequest.model_construct(**_fields(body).values(body))


# Answer
@dataclass(frozen=True, slots=True)
class GenerateAnswer:
    """output_ids: as sampled, with the end token and the tokens of a stop string. prompt_token_ids: null unless asked
    for. usage (our extension): as in other answers.

    meta_info: id, finish_reason (type stop, length or abort, and what ended the text), prompt_tokens,
    completion_tokens, cached_tokens, weight_version (of the last token), weight_versions (of all of them; in a stream,
    both only at its end); with
    return_logprob also output_token_logprobs and input_token_logprobs, lists of [logprob, token id, text or null], and
    with top_logprobs_num output_top_logprobs and input_top_logprobs, a list of such for each token.
    """

    text: str
    output_ids: list[int]
    prompt_token_ids: list[int] | None
    meta_info: dict[str, Any]
    usage: Usage


Entry = tuple[float | None, int, str | None]
"""(logprob, token id, text), as SGLang's lists have them."""


def build_generate_answer(
    body: GenerateRequest, prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], model: ServedModel
) -> GenerateAnswer:
    """results: the only sequence of the only request."""
    ((sequence,),) = results
    text = Choice(prepared.requests[0], prepared, model).add(sequence).text
    return _Answer(body, prepared, model).build(sequence, text, sequence.finish_reason)


class GenerateStream(AnswerStream):
    """Each event is an answer with all tokens until then."""

    object_name = ""

    def __init__(self, body: GenerateRequest, prepared: Prepared, model: ServedModel, options: StreamOptions) -> None:
        super().__init__(prepared, model, options)
        self._answer = _Answer(body, prepared, model)
        self._sequence = FinishedSequence()
        self._choice = Choice(prepared.requests[0], prepared, model)
        self._text = ""

    def shows_prompts(self, _deltas: Sequence[tuple[int, SequenceDelta]]) -> bool:
        return self._prepared.return_token_ids

    def events(self, deltas: Sequence[tuple[int, SequenceDelta]]) -> bytes:
        for _, delta in deltas:
            self._sequence.append(delta)
            self._text += self._choice.add(delta).text
        reason = self._sequence.finish_reason if self._sequence.is_finished else None
        answer = self._answer.build(self._sequence, self._text, reason)
        return b"data: %b\n\n" % write_json(answer)

    def _chunk_choices(self, *_arguments: object) -> Sequence[ChunkChoice]:
        raise AssertionError("answers have no choices")


class _Answer:
    """Builds the answers to one body."""

    def __init__(self, body: GenerateRequest, prepared: Prepared, model: ServedModel) -> None:
        self._body = body
        self._prepared = prepared
        (self._request,) = prepared.requests
        self._model = model
        self._name = model.tokenizer.token_text if body.return_text_in_logprobs else lambda _: None

    def build(self, sequence: FinishedSequence, text: str, reason: FinishReason | None) -> GenerateAnswer:
        """text: of all tokens. reason: None before the end."""
        body = self._body
        spans = weight_spans(sequence.weight_versions, len(sequence.token_ids))
        matched = None if reason != "stop" else self._matched(sequence.token_ids)
        usage = build_usage(self._prepared, [[sequence]])
        meta_info: dict[str, Any] = {
            "id": self._prepared.response_id if body.rid is None else body.rid,
            "finish_reason": _finish_reason(reason, matched, len(sequence.token_ids)),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": sequence.num_cached_tokens,
        }
        if reason is not None:  # not known before
            meta_info |= {"weight_version": spans[-1].version, "weight_versions": spans}
        if sequence.experts is not None and self._prepared.experts_from is not None:
            own = sequence.experts[self._prepared.experts_from :].astype(np.int32)
            meta_info["routed_experts"] = base64.b64encode(own.tobytes()).decode()
        if sequence.logprobs is not None:
            meta_info |= self._logprobs(sequence)
        prompt_ids = self._request.prompt_ids.tolist() if body.return_prompt_token_ids else None
        return GenerateAnswer(text, sequence.token_ids, prompt_ids, meta_info, usage)

    def _matched(self, token_ids: Sequence[int]) -> int | str | None:
        """The token or the stop string that ended the text; None if a grammar did."""
        request = self._request
        ends = request.stop_token_ids if request.ignore_eos else (*request.stop_token_ids, *self._model.eos_ids)
        if token_ids and token_ids[-1] in ends:
            return token_ids[-1]
        tokenizer = self._model.tokenizer.with_special() if request.shows_special else self._model.tokenizer
        tail = tokenizer.prompt_tail(request.prompt_ids[-PROMPT_TAIL_TOKENS:].tolist())
        special = find_special_stops(tokenizer, request.stop_strings, () if request.shows_special else None)
        decode, stops = (tokenizer.decode, request.stop_strings) if special is None else (special.decode, special.stops)
        text = tail.text_after(decode, token_ids)
        found = max((stop for stop in stops if stop in text), key=text.rfind, default=None)
        return found if special is None or found is None else special.as_given(found)

    def _logprobs(self, sequence: FinishedSequence) -> dict[str, Any]:
        body, prompt = self._body, sequence.prompt_logprobs
        assert sequence.logprobs is not None
        found: dict[str, Any] = {
            "input_token_logprobs": [] if prompt is None else self._of_prompt(prompt),
            "output_token_logprobs": self._entries(sequence.logprobs, sequence.token_ids),
        }
        if body.top_logprobs_num:
            tops = likely_tokens(sequence.top, len(sequence.token_ids))
            found["output_top_logprobs"] = [self._likely(top) for top in tops]
            found["input_top_logprobs"] = [] if prompt is None else self._tops_of_prompt(prompt)
        return found

    def _entries(self, logprobs: Sequence[float | None], token_ids: Sequence[int]) -> list[Entry]:
        pairs = zip(logprobs, token_ids, strict=True)
        return [(logprob, token_id, self._name(token_id)) for logprob, token_id in pairs]

    def _likely(self, top: Sequence[tuple[int, float]]) -> list[Entry]:
        return [(logprob, token_id, self._name(token_id)) for token_id, logprob in top]

    def _of_prompt(self, prompt: PromptLogprobs) -> list[Entry]:
        start = self._body.logprob_start_len
        logprobs: list[float | None] = prompt.logprobs[start:].tolist()
        if start == 0:
            logprobs[0] = None
        return self._entries(logprobs, self._request.prompt_ids[start:].tolist())

    def _tops_of_prompt(self, prompt: PromptLogprobs) -> list[list[Entry] | None]:
        start = self._body.logprob_start_len
        tops = likely_tokens(prompt.top, len(self._request.prompt_ids))[start:]
        found: list[list[Entry] | None] = [self._likely(top[: self._body.top_logprobs_num]) for top in tops]
        if start == 0:
            found[0] = None
        return found


def _finish_reason(reason: FinishReason | None, matched: int | str | None, num_tokens: int) -> dict[str, object] | None:
    match reason:
        case "stop":
            return {"type": reason, "matched": matched}
        case "length":
            return {"type": reason, "length": num_tokens}
        case "abort":
            return {"type": reason, "message": "the request was aborted"}
    return None


# Pauses, sleep and weights: bodies and answers
class PauseGenerationRequest(OptionalObject):
    """mode: running requests are ended by "abort" with the tokens that they have; or kept, by either of the others."""

    mode: Annotated[Literal["abort", "retract", "in_place"], NullMeans("abort")] = "abort"


class ContinueGenerationRequest(OptionalObject):
    """torch_empty_cache: without effect; memory that is free is given back at once."""

    torch_empty_cache: bool | None = None


class AbortRequest(OptionalObject):
    """rid: of the request to abort; unknown ones are ignored. abort_all: all requests."""

    rid: str | None = None
    abort_all: Annotated[bool, NullMeans(False)] = False
    abort_message: str | None = None


class UpdateFromDiskRequest(StrictObject):
    """model_path: a directory on the server's machine with safetensors files of all of the model's tensors, or an
    adapter's files.

    weight_version: a name for the weights; null counts on from the last number. abort_all_requests: end running
    requests by "abort" first; by default they are waited for, unless the engine is paused. flush_cache: forget the KV
    of all prompts. keep_pause: leave the engine paused.
    Without effect: torch_empty_cache, token_step.
    """

    model_path: Text
    weight_version: VersionName | None = None
    abort_all_requests: Annotated[bool, NullMeans(False)] = False
    abort_all_request: Annotated[bool, NullMeans(False)] = False  # as older trainers spell it
    flush_cache: Annotated[bool, NullMeans(True)] = True
    keep_pause: Annotated[bool, NullMeans(False)] = False

    torch_empty_cache: bool | None = None
    token_step: int | None = None

    load_format: Annotated[Any, Only(None, "auto", "safetensors")] = None
    is_async: Annotated[Any, Only(None, False)] = None
    recapture_cuda_graph: Annotated[Any, Only(None, False)] = None
    manifest: Annotated[Any, Only(None)] = None


MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]


class MemoryRequest(OptionalObject):
    """tags: whose memory; null means all. cuda_graph: without effect, since
    graphs go and come with kv_cache."""

    tags: Annotated[list[MemoryTag] | None, Field(min_length=1, fail_fast=True)] = None

    @property
    def chosen(self) -> frozenset[str]:
        every: frozenset[str] = frozenset({"kv_cache", "weights"})
        return every if self.tags is None else every.intersection(self.tags)


@dataclass(frozen=True, slots=True)
class Success:
    """message: for people."""

    success: bool
    message: str


@dataclass(frozen=True, slots=True)
class UpdateSuccess(Success):
    """num_paused_requests: requests that go on with the new weights. weight_version: the name of the weights."""

    num_paused_requests: int
    weight_version: str


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Sequences and KV of one replica; each of n samples is a sequence. Those that wait for a replica, or for the end
    of a pause, count as waiting at the first one."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float


@dataclass(frozen=True, slots=True)
class Loads:
    """timestamp: when, in ISO 8601."""

    timestamp: str
    version: str
    loads: list[ReplicaLoad]


# Routes
router = APIRouter(route_class=JsonBodyRoute, tags=["roll-outs"])

PROBE_SECONDS = 20.0
"""Longest time for the token of /health_generate."""

_STREAMED = {"text/event-stream": {"schema": {"description": "Answers so far as server-sent events."}}}
_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}
_LOADS_SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})


@router.post(
    "/generate",
    responses=answers(GenerateAnswer, *BODY_ERRORS, 404, 429, 503, content=_STREAMED),
    openapi_extra=example_body({"text": "Once upon a time", "sampling_params": {"max_new_tokens": 20}}),
)
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Continue one prompt."""
    state = state_of(request)
    session = session_of(request) if body.session_id is None else body.session_id
    origin = Origin(num_body_bytes(request), client_of(request), session=session)
    endpoint = _endpoint(body)
    fields = _fields(body)

    async def prepare() -> Prepared:
        with fields.naming():
            return await endpoint.prepare(state, completion_of_generate(body), origin)

    if body.stream:
        prepared = await run_while_connected(request.receive, prepare())
        return EventStream(_named_events(endpoint, state, body, prepared))

    async def answer() -> bytes:
        prepared = await prepare()
        with state.engine.control.named(body.rid, prepared.requests), fields.naming():
            return (await endpoint.answer_prepared(state, prepared)).content

    return _json(await run_while_connected(request.receive, answer()))


def _endpoint(body: GenerateRequest) -> Endpoint[CompletionRequest]:
    # null: all that there is room for
    default = None if "max_new_tokens" in body.sampling_params.model_fields_set else DEFAULT_NEW_TOKENS
    draft = partial(draft_completion, default_tokens=default, may_only_score=True)
    return Endpoint(
        CompletionRequest, draft, partial(build_generate_answer, body), partial(GenerateStream, body), False
    )


async def _named_events(
    endpoint: Endpoint[CompletionRequest], state: ServerState, body: GenerateRequest, prepared: Prepared
) -> AsyncGenerator[bytes, None]:
    with state.engine.control.named(body.rid, prepared.requests):
        async with aclosing(StreamedAnswer(endpoint, state, prepared, StreamOptions()).events()) as events:
            async for event in events:
                yield event


@router.post("/pause_generation", responses=answers(Success, *BODY_ERRORS, 503))
async def pause_generation(request: Request, body: PauseGenerationRequest) -> Response:
    """Returns when no step runs; new requests wait."""
    await ready_state_of(request).engine.control.pause(_MODES[body.mode], clears_cache=False)
    return _json(write_json(Success(True, "paused")))


@router.post("/continue_generation", responses=answers(Success, *BODY_ERRORS, 503))
async def continue_generation(
    request: Request,
    body: ContinueGenerationRequest,  # noqa: ARG001  (it has been checked)
) -> Response:
    """Go on after /pause_generation. Does nothing unless the engine is paused."""
    await ready_state_of(request).engine.control.resume()
    return _json(write_json(Success(True, "goes on")))


@router.post("/abort_request", responses=answers(Success, *BODY_ERRORS, 503))
async def abort_request(request: Request, body: AbortRequest) -> Response:
    """End requests by "abort" with the tokens that they have; others go on."""
    if body.abort_all or body.rid:
        await ready_state_of(request).engine.control.abort(None if body.abort_all else body.rid)
    return _json(write_json(Success(True, "aborted")))


@router.post("/update_weights_from_disk", responses=answers(UpdateSuccess, *BODY_ERRORS, 503))
async def update_weights_from_disk(request: Request, body: UpdateFromDiskRequest) -> Response:
    """Replace the model's weights in place, on every replica."""
    state = ready_state_of(request)
    rollouts = state.engine.control
    mode: PauseMode = "abort" if body.abort_all_requests or body.abort_all_request else "wait"
    if body.keep_pause:
        await rollouts.pause(mode, clears_cache=False)
        mode = "keep"
    version = await rollouts.update(
        body.model_path, body.weight_version, clears_cache=body.flush_cache, mode=mode, param="model_path"
    )
    kept = state.engine.num_pending_requests
    return _json(write_json(UpdateSuccess(True, f"the weights are {version}", kept, version)))


@router.get("/get_weight_version", responses=answers(WeightVersion))
async def get_weight_version(request: Request) -> JSONResponse:
    """The name of the newest weights."""
    return JSONResponse({"weight_version": state_of(request).engine.control.weight_version})


@router.get("/flush_cache", responses=answers(Success, 409, 503))
@router.post("/flush_cache", responses=answers(Success, 409, 503))
async def flush_cache(request: Request) -> Response:
    """Forget the KV of all prompts; 409 while any request is unfinished."""
    engine = ready_state_of(request).engine
    has_flushed = False
    if not engine.num_pending_requests:
        with suppress(Conflict):
            await engine.control.clear_cache()
            has_flushed = True
    if not has_flushed:
        raise Conflict("requests are running or waiting: the cache was not flushed")
    return _json(write_json(Success(True, "flushed")))


@router.post("/release_memory_occupation", responses=answers(Success, *BODY_ERRORS, 409, 503))
async def release_memory_occupation(request: Request, body: MemoryRequest) -> Response:
    """Give memory back to the system until /resume_memory_occupation; requests wait. The memory of the weights can be
    given back only together with the KV cache's, or after it."""
    rollouts = ready_state_of(request).engine.control
    if not body.chosen:
        if ready_state_of(request).ready_limits().device == "cuda":
            raise Conflict("the engine goes on: the memory of CUDA graphs is not given back")
        return _json(write_json(Success(True, "there are no CUDA graphs on a CPU")))
    await rollouts.sleep("keep", body.chosen)
    return _json(write_json(Success(True, "released")))


@router.post("/resume_memory_occupation", responses=answers(Success, *BODY_ERRORS, 409, 503))
async def resume_memory_occupation(request: Request, body: MemoryRequest) -> Response:
    """Take the memory again, all of it whatever the tags; requests go on once "kv_cache" is among them."""
    rollouts = ready_state_of(request).engine.control
    if not body.chosen:
        return _json(write_json(Success(True, "no memory was released")))
    await rollouts.wake(stays_paused="kv_cache" not in body.chosen)
    return _json(write_json(Success(True, "resumed")))


@router.get("/get_server_info", responses=error_responses(503))
async def get_server_info(request: Request) -> Response:
    """What trainers read of SGLang's arguments and state. GET /server_info is its newer name."""
    return write_server_info(ready_state_of(request))


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> JSONResponse:
    """What trainers and routers read of SGLang's model."""
    state = state_of(request)
    return JSONResponse(
        {
            "model_path": _model_path(state),
            "served_model_name": state.model.name,
            "tokenizer_path": state.config.tokenizer or _model_path(state),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": state.engine.control.weight_version,
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


def _model_path(state: ServerState) -> str:
    return state.config.model or state.model.name  # the demo model's files have no name in the flags


def write_server_info(state: ServerState) -> Response:
    """The answer of /get_server_info. Raises EngineNotReady."""
    config, limits = state.config, state.ready_limits()
    info = {
        "model_path": _model_path(state),
        "served_model_name": state.model.name,
        "dtype": limits.dtype,
        "context_length": limits.max_tokens_per_sequence,
        "max_total_num_tokens": limits.num_kv_tokens,
        "page_size": limits.page_size,
        "max_running_requests": config.max_seqs_per_forward,
        "tp_size": config.tp_size,
        "pp_size": config.pp_size,
        "dp_size": num_replicas(config),
        "ep_size": 1,
        "nnodes": 1,
        "node_rank": 0,
        "weight_version": state.engine.control.weight_version,
        "version": __version__,
        "internal_states": _loads(state),
    }
    return _json(write_json(info))


@router.get("/health_generate", responses=error_responses(503))
async def health_generate(request: Request) -> Response:
    """The engine computes a token, or is paused and would."""
    state = ready_state_of(request)
    state.check_ready()
    if not state.engine.control.is_paused:
        probe = GenerateRequest.model_validate({"input_ids": [0], "sampling_params": {"max_new_tokens": 1}})
        work = _endpoint(probe).answer(state, completion_of_generate(probe), Origin(client=client_of(request)))
        try:
            await asyncio.wait_for(work, PROBE_SECONDS)
        except asyncio.TimeoutError:
            if not state.engine.control.is_paused:
                raise EngineNotReady(f"the engine computed no token in {PROBE_SECONDS:.0f} s") from None
    return _json(write_json(Success(True, "healthy")))


@router.get("/v1/loads", responses=answers(Loads, 400, 503))
async def loads(request: Request, include: str | None = None, dp_rank: int | None = None) -> Response:
    """How many sequences each replica has. include: names of SGLang's sections; the counts are those of core, and the
    others would add nothing."""
    state = ready_state_of(request)
    for name in (include or "core").split(","):
        if name.strip() not in _LOADS_SECTIONS:
            raise InvalidRequest(f"include: there is no section {name.strip()!r}", "include")
    found = [load for load in _loads(state) if dp_rank in (None, load.dp_rank)]
    if not found:
        raise InvalidRequest(f"dp_rank: there is no replica {dp_rank}", "dp_rank")
    return _json(write_json(Loads(datetime.now(timezone.utc).isoformat(), __version__, found)))


def _loads(state: ServerState) -> list[ReplicaLoad]:
    limits, engine = state.ready_limits(), state.engine
    found = []
    for index, (stats, num_sequences) in enumerate(zip(engine.stats, engine.num_unfinished_sequences, strict=True)):
        num_all = num_sequences + (engine.num_unsent_sequences if index == 0 else 0)
        num_running = 0 if stats is None else min(stats.num_running, num_sequences)
        num_blocks = 0 if stats is None else stats.num_kv_blocks_used
        load = ReplicaLoad(
            dp_rank=index,
            num_running_reqs=num_running,
            num_waiting_reqs=num_all - num_running,
            num_total_reqs=num_all,
            num_used_tokens=num_blocks * limits.page_size // limits.blocks_per_page,
            max_total_num_tokens=limits.num_kv_tokens,
            token_usage=num_blocks / limits.num_kv_blocks,
        )
        found.append(load)
    return found


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
