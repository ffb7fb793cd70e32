"""Roll-outs by vLLM's names: tokens in and out, pauses, new weights. Served with rl=T."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, PlainValidator

from tokasaurus.messages.generation import FinishReason, LogprobsMode
from tokasaurus.server.access import client_of, session_of
from tokasaurus.server.dialects.sglang_rollouts import write_server_info
from tokasaurus.server.endpoint import Endpoint
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.engine_client.control import PauseMode
from tokasaurus.server.errors import InvalidRequest, UnsupportedField
from tokasaurus.server.event_stream import run_while_connected
from tokasaurus.server.json_body import JsonBodyRoute
from tokasaurus.server.openapi import BODY_ERRORS, answers, error_responses, example_body
from tokasaurus.server.prepare.completion import draft_completion
from tokasaurus.server.prepare.field_table import FieldTable
from tokasaurus.server.prepare.requests import Origin, Prepared
from tokasaurus.server.protocol.answers import Usage, WeightVersion, WrittenPromptLogprobs
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.protocol.fields import (
    WHOLE_FLOATS,
    NullMeans,
    Only,
    OptionalObject,
    StrictObject,
    Text,
    TokenIds,
    VersionName,
    not_implemented,
    value_error,
)
from tokasaurus.server.protocol.grammar_fields import StructuredOutputs
from tokasaurus.server.protocol.sampling_fields import (
    AllowedTokenIds,
    BadWords,
    CacheSalt,
    Priority,
    SamplingNumbers,
    Seed,
)
from tokasaurus.server.respond.logprobs import likely_tokens
from tokasaurus.server.respond.stream import CompletionStream
from tokasaurus.server.respond.whole import build_usage, write_prompt_logprobs
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import ServerState, num_body_bytes, ready_state_of, state_of
from tokasaurus.server.value_words import MAX_ECHO_CHARS
from tokasaurus.workers import max_adapter_rank, num_adapters, num_workers


# Tokens: body
class TokensSampling(SamplingNumbers):
    """vLLM's sampling parameters.

    max_tokens: null is all that the prompt leaves of max_model_len. logprobs: of each sampled token, and this many most
    likely ones. prompt_logprobs: of the prompt's tokens, and this many most likely ones at each position.

    Without effect, since the answer has no text and all tokens as sampled: skip_special_tokens,
    spaces_between_special_tokens, include_stop_str_in_output, detokenize. Without effect, since an answer is one
    object: output_kind.
    """

    n: Annotated[int, Field(ge=1), WHOLE_FLOATS, NullMeans(1)] = 1
    max_tokens: Annotated[int | None, Field(ge=1), WHOLE_FLOATS] = None
    min_tokens: Annotated[int, Field(ge=0), WHOLE_FLOATS, NullMeans(0)] = 0
    seed: Seed = None
    logprobs: Annotated[int | None, Field(ge=0), WHOLE_FLOATS] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0), WHOLE_FLOATS] = None
    structured_outputs: StructuredOutputs = None
    cache_salt: CacheSalt = ""
    allowed_token_ids: AllowedTokenIds = None
    bad_words: BadWords = ()

    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    detokenize: bool | None = None
    output_kind: Annotated[int | None, Field(ge=0, le=2), WHOLE_FLOATS] = None
    return_routed_experts: Annotated[bool, NullMeans(False)] = False
    routed_experts_prompt_start: Annotated[int | None, Field(ge=0), WHOLE_FLOATS] = None

    logits_processors: Annotated[Any, Only(None, [])] = None
    truncate_prompt_tokens: Annotated[Any, Only(None)] = None
    logprob_token_ids: Annotated[Any, Only(None)] = None
    flat_logprobs: Annotated[Any, Only(None, False)] = None
    skip_reading_prefix_cache: Annotated[Any, Only(None, False)] = None
    thinking_token_budget: Annotated[Any, Only(None)] = None
    extra_args: Annotated[Any, Only(None, {})] = None


class TokensRequest(StrictObject):
    """Tokens in, tokens out.

    model: as in other bodies; null is the served model. request_id: returned in the answer; null draws one.
    return_token_ids: also return the prompt's tokens. cache_salt: also accepted in sampling_params.
    """

    model: str | None = None
    request_id: Text | None = None
    token_ids: TokenIds
    sampling_params: Annotated[TokensSampling, NullMeans(TokensSampling())] = Field(default_factory=TokensSampling)
    cache_salt: CacheSalt = ""
    priority: Priority = 0
    return_token_ids: Annotated[bool, NullMeans(False)] = False

    stream: Annotated[Any, Only(None, False)] = None
    stream_options: Annotated[Any, Only(None)] = None
    output_mode: Annotated[Any, Only(None, "tokens")] = None
    features: Annotated[Any, Only(None)] = None
    content_parts: Annotated[Any, Only(None, [])] = None
    kv_transfer_params: Annotated[Any, Only(None)] = None
    ec_transfer_params: Annotated[Any, Only(None)] = None


# Preparation
_FIELDS = FieldTable[TokensRequest](
    model="model",
    prompt=("token_ids", lambda body: [body.token_ids]),
    cache_salt=("cache_salt", lambda body: body.cache_salt or body.sampling_params.cache_salt),
    priority="priority",
    return_token_ids="return_token_ids",
    **{
        name: f"sampling_params.{name}"
        for name in (
            *SamplingNumbers.model_fields,
            *("n", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs", "structured_outputs"),
            *("allowed_token_ids", "bad_words", "return_routed_experts", "routed_experts_prompt_start"),
        )
    },
)
"""Fields of the completions body that a TokensRequest becomes."""


def completion_of_tokens(body: TokensRequest) -> CompletionRequest:
    """Validated already, as `body` is. Raises InvalidRequest."""
    salts = {salt for salt in (body.cache_salt, body.sampling_params.cache_salt) if salt}
    if len(salts) > 1:
        raise InvalidRequest("cache_salt and sampling_params.cache_salt differ: one of them is enough", "cache_salt")
    return CompletionRequest.model_construct(**_FIELDS.values(body))


# Answer
@dataclass(frozen=True, slots=True)
class RankedToken:
    """token: its id, as "token_id:123". rank: 1 for the most likely token."""

    token: str
    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """rank: null if it is not among the most likely ones that were asked for. top_logprobs: most likely first."""

    token: str
    token_id: int
    logprob: float
    rank: int | None
    top_logprobs: list[RankedToken]


@dataclass(frozen=True, slots=True)
class TokensLogprobs:
    """content: one for each of the choice's token_ids."""

    content: list[SampledToken]


@dataclass(frozen=True, slots=True)
class TokensChoice:
    """token_ids: as sampled, with the end token and the tokens of a stop string."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: TokensLogprobs | None


@dataclass(frozen=True, slots=True)
class TokensAnswer:
    """prompt_logprobs: as in other answers. prompt_token_ids: with return_token_ids, else null.

    Each choice also has weight_versions, the versions of the weights that its tokens are from, and the answer
    weight_version, the newest of them; and routed_experts if they are asked for."""

    request_id: str
    model: str
    created: int
    choices: Sequence[TokensChoice]
    prompt_logprobs: WrittenPromptLogprobs | None
    prompt_token_ids: list[int] | None
    usage: Usage


def build_tokens_answer(
    body: TokensRequest, prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], model: ServedModel
) -> TokensAnswer:
    """results: the sequences of the only request, in order."""
    (row,) = results
    choices = [
        TokensChoice(index, sequence.token_ids, sequence.finish_reason, _logprobs(sequence))
        for index, sequence in enumerate(row)
    ]
    return TokensAnswer(
        request_id=prepared.response_id if body.request_id is None else body.request_id,
        model=prepared.adapter_name or model.name,
        created=int(time.time()),
        choices=choices,
        prompt_logprobs=write_prompt_logprobs(0, prepared, row[0].prompt_logprobs, model),
        prompt_token_ids=prepared.requests[0].prompt_ids.tolist() if body.return_token_ids else None,
        usage=build_usage(prepared, results),
    )


def _logprobs(sequence: FinishedSequence) -> TokensLogprobs | None:
    if sequence.logprobs is None:
        return None
    tops = likely_tokens(sequence.top, len(sequence.token_ids))
    return TokensLogprobs([_sampled(*entry) for entry in zip(sequence.token_ids, sequence.logprobs, tops, strict=True)])


def _sampled(token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> SampledToken:
    """top: (token id, logprob) of the most likely tokens, most likely first."""
    ranked = [RankedToken(f"token_id:{other}", other, value, rank) for rank, (other, value) in enumerate(top, start=1)]
    rank = next((entry.rank for entry in ranked if entry.token_id == token_id), None)
    return SampledToken(f"token_id:{token_id}", token_id, logprob, rank, ranked)


# Pauses, sleep and weights: bodies and answers
def _refuse_nccl(value: object) -> object:
    if value is not None:
        raise not_implemented(
            "tells of weights sent through NCCL or CUDA IPC, which this server does not receive: write them to a "
            "directory of safetensors files, such as one in /dev/shm, and name it in weight_dir"
        )
    return value


_OfNccl = Annotated[Any, PlainValidator(_refuse_nccl, None)]


class _NoNccl(StrictObject):
    names: _OfNccl = None
    dtype_names: _OfNccl = None
    shapes: _OfNccl = None
    packed: _OfNccl = None
    ipc_handles: _OfNccl = None
    ipc_handles_pickled: _OfNccl = None


class WeightsUpdate(_NoNccl):
    """weight_dir: a directory on the server's machine with safetensors files of the model's tensors, or an
    adapter's files.

    version: a name for the weights; null counts on from the last number. partial: tensors may be missing, and stay as
    they are. mode: what becomes of running requests, unless the engine is paused already, as for /pause. clear_cache:
    forget the KV of all prompts.
    """

    weight_dir: Text
    version: VersionName | None = None
    partial: Annotated[bool, NullMeans(False)] = False
    mode: Annotated[PauseMode, NullMeans("keep")] = "keep"
    clear_cache: Annotated[bool, NullMeans(True)] = True


class UpdateWeightsRequest(WeightsUpdate):
    """A WeightsUpdate, or an update_info with its fields, as vLLM's own transfers send it."""

    weight_dir: Text | None = None  # type: ignore[assignment]  # one of the two is given
    update_info: WeightsUpdate | None = None


class TransferInfo(OptionalObject):
    """backend: how weights come; files in a directory are the only way."""

    backend: Annotated[Any, Only(None, "files")] = None

    master_address: _OfNccl = None
    master_port: _OfNccl = None
    rank_offset: _OfNccl = None
    world_size: _OfNccl = None
    packed: _OfNccl = None


class InitTransferRequest(StrictObject):
    init_info: Annotated[TransferInfo, NullMeans(TransferInfo())]


class StartUpdateRequest(OptionalObject):
    """is_checkpoint_format: tensors have the names and shapes of the model's files, which is the only form."""

    is_checkpoint_format: Annotated[Any, Only(None, True)] = None


class FinishUpdateRequest(OptionalObject):
    """weight_version: must be the version of the weights that were sent, if given before."""

    weight_version: VersionName | None = None


class ResetCacheRequest(OptionalObject):
    """reset_running_requests: what runs is no obstacle: it keeps its tokens, computes its KV again, and goes on."""

    reset_running_requests: Annotated[bool, NullMeans(False)] = False
    reset_external: Annotated[Any, Only(None, False)] = None


RpcMethod = Literal[
    "start_weight_update",
    "skyrl_start_weight_update",
    "update_weights",
    "update_weights_nccl",
    "update_weights_ipc",
    "finish_weight_update",
    "skyrl_finish_weight_update",
]


def _parse_method(value: object) -> object:
    if not isinstance(value, str):
        raise value_error("must be a string: the name of a method")
    if value not in get_args(RpcMethod):
        raise not_implemented(
            f"may not be {value[:MAX_ECHO_CHARS]!r}: workers run no methods of a client. Only "
            f"{', '.join(get_args(RpcMethod))} are served, as the routes that update weights"
        )
    return value


class RpcArguments(StrictObject):
    """is_checkpoint_format: as for /start_weight_update. update_info: of an update of the weights."""

    is_checkpoint_format: Annotated[Any, Only(None, True)] = None
    update_info: WeightsUpdate | None = None


class RpcRequest(StrictObject):
    """method: what to do; SkyRL's names are those of the methods that it adds to vLLM's workers. timeout: no effect."""

    method: Annotated[RpcMethod, PlainValidator(_parse_method, RpcMethod)]
    args: Annotated[Any, Only(None, [])] = None
    kwargs: Annotated[RpcArguments, NullMeans(RpcArguments())] = Field(default_factory=RpcArguments)
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class RpcResults:
    """results: null for each worker."""

    results: list[None]


@dataclass(frozen=True, slots=True)
class FinishedSession:
    """session_id: the name, which may be unknown."""

    session_id: str


@dataclass(frozen=True, slots=True)
class PauseState:
    is_paused: bool


@dataclass(frozen=True, slots=True)
class CacheReset(PauseState):
    """success: true, since a cache that cannot be reset is an error."""

    success: Literal[True] = True


Level = Literal["1", "2"]
"""Level of sleep, as a query parameter."""


@dataclass(frozen=True, slots=True)
class SleepState:
    is_sleeping: bool


@dataclass(frozen=True, slots=True)
class WorldSize:
    """world_size: workers of all replicas, or of one with include_dp=false."""

    world_size: int


# Routes
MemoryTags = Annotated[list[Literal["kv_cache", "weights"]] | None, Query()]

router = APIRouter(route_class=JsonBodyRoute, tags=["roll-outs"])

_draft = partial(draft_completion, default_tokens=None)
_LOGPROBS_MODES: Mapping[LogprobsMode, str] = {"raw": "raw_logprobs", "sampled": "processed_logprobs"}
"""vLLM's names of logprobs_mode."""


@router.post(
    "/inference/v1/generate",
    responses=answers(TokensAnswer, *BODY_ERRORS, 404, 429, 503),
    openapi_extra=example_body({"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 20}}),
)
async def generate(request: Request, body: TokensRequest) -> Response:
    """Continue the tokens of one prompt, `n` times."""
    state = state_of(request)
    origin = Origin(num_body_bytes(request), client_of(request), session=session_of(request))
    endpoint = Endpoint(CompletionRequest, _draft, partial(build_tokens_answer, body), CompletionStream, False)
    with _FIELDS.naming():
        work = endpoint.answer(state, completion_of_tokens(body), origin)
        answer = await run_while_connected(request.receive, work)
    return Response(answer.content, media_type="application/json")


@router.post("/pause", responses=answers(PauseState, 400, 503))
async def pause(
    request: Request,
    mode: PauseMode = "abort",
    clear_cache: bool = True,
    wait_for_inflight_requests: bool = False,
) -> JSONResponse:
    """Returns when no step runs; new requests wait. mode: running requests are ended by "abort" with the tokens that
    they have, waited for, or kept until /resume. clear_cache: forget the KV of all prompts.
    wait_for_inflight_requests: an older word for the mode "wait"."""
    await ready_state_of(request).engine.control.pause("wait" if wait_for_inflight_requests else mode, clear_cache)
    return JSONResponse({"is_paused": True})


@router.post("/resume", responses=answers(PauseState, 503))
async def resume(request: Request) -> JSONResponse:
    """Go on after /pause. Does nothing unless the engine is paused."""
    await ready_state_of(request).engine.control.resume()
    return JSONResponse({"is_paused": False})


@router.get("/is_paused", responses=answers(PauseState))
async def is_paused(request: Request) -> JSONResponse:
    """Whether /pause has paused the engine."""
    return JSONResponse({"is_paused": state_of(request).engine.control.is_paused})


@router.post("/sleep", responses=answers(SleepState, 400, 409, 503))
async def sleep(
    request: Request,
    level: Level = "1",
    mode: PauseMode = "keep",
    refuse: bool = False,
    tags: MemoryTags = None,
) -> JSONResponse:
    """Give memory back to the system until /wake_up: of the KV cache, and on level 2 of the weights, which are read
    from their files again. mode: as for /pause. refuse: new requests get 503 meanwhile, instead of waiting. tags: whose
    memory, in place of the level: kv_cache, or weights with or after it."""
    parts = frozenset(tags or (("kv_cache", "weights") if level == "2" else ("kv_cache",)))
    await ready_state_of(request).engine.control.sleep(mode, parts, refuses=refuse)
    return JSONResponse({"is_sleeping": True})


@router.post("/wake_up", responses=answers(SleepState, 409, 503))
async def wake_up(request: Request, tags: MemoryTags = None) -> JSONResponse:
    """Take the memory again, all of it whatever the tags, and go on if kv_cache is among them or there are none. Does
    nothing unless the engine sleeps."""
    await ready_state_of(request).engine.control.wake(stays_paused=bool(tags and "kv_cache" not in tags))
    return JSONResponse({"is_sleeping": False})


@router.get("/is_sleeping", responses=answers(SleepState))
async def is_sleeping(request: Request) -> JSONResponse:
    """Whether the engine has given memory back to the system."""
    return JSONResponse({"is_sleeping": state_of(request).engine.control.is_asleep})


@router.post("/reset_prefix_cache", responses=answers(CacheReset, *BODY_ERRORS, 409, 503))
async def reset_prefix_cache(request: Request, body: ResetCacheRequest) -> JSONResponse:
    """Forget the KV of all prompts; 409 while requests run, unless they are reset. The fields may be in the query."""
    rollouts = ready_state_of(request).engine.control
    if _flag(request, "reset_external"):
        raise UnsupportedField("reset_external is not implemented: no cache lies outside the server", "reset_external")
    await rollouts.clear_cache(body.reset_running_requests or _flag(request, "reset_running_requests"))
    return JSONResponse({"is_paused": rollouts.is_paused, "success": True})


@router.post("/update_weights", responses=answers(WeightVersion, *BODY_ERRORS, 503))
async def update_weights(request: Request, body: UpdateWeightsRequest) -> JSONResponse:
    """Replace the model's weights in place, on every replica."""
    state = ready_state_of(request)
    update: WeightsUpdate = body if body.update_info is None else body.update_info
    prefix = "" if body.update_info is None else "update_info."
    if body.update_info is not None and body.weight_dir is not None:
        raise InvalidRequest("weight_dir and update_info: only one of them may be given", "update_info")
    return JSONResponse({"weight_version": await _update(state, update, prefix)})


@router.post("/init_weight_transfer_engine", responses=answers(WeightVersion, *BODY_ERRORS))
async def init_weight_transfer_engine(request: Request, body: InitTransferRequest) -> JSONResponse:  # noqa: ARG001  (it has been checked)
    """Whether weights can come as the trainer sends them: files in a directory can, and nothing has to be set up."""
    return _version(state_of(request))


@router.post("/start_weight_update", responses=answers(WeightVersion, *BODY_ERRORS, 503))
async def start_weight_update(request: Request, body: StartUpdateRequest) -> JSONResponse:  # noqa: ARG001  (it has been checked)
    """The following /update_weights are parts of one update, until /finish_weight_update; no step runs meanwhile."""
    state = ready_state_of(request)
    await state.engine.control.start_update()
    return _version(state)


@router.post("/finish_weight_update", responses=answers(WeightVersion, *BODY_ERRORS, 503))
async def finish_weight_update(request: Request, body: FinishUpdateRequest) -> JSONResponse:
    """The end of the update; resumes an engine that /start_weight_update has paused."""
    state = ready_state_of(request)
    version = state.engine.control.weight_version
    if body.weight_version not in (None, version):
        reason = f"weight_version must be {version!r}: update_info.version of /update_weights names the weights"
        raise InvalidRequest(reason, "weight_version")
    await state.engine.control.finish_update()
    return _version(state)


@router.post("/collective_rpc", responses=answers(RpcResults, *BODY_ERRORS, 503))
async def collective_rpc(request: Request, body: RpcRequest) -> JSONResponse:
    """Some methods of vLLM's and SkyRL's workers, which do what routes of these names do."""
    state = ready_state_of(request)
    step = body.method.removeprefix("skyrl_")
    update = body.kwargs.update_info
    if step.startswith("update_weights"):
        if update is None:
            raise InvalidRequest(f"kwargs.update_info is required for {body.method}", "kwargs.update_info")
        await _update(state, update, "kwargs.update_info.")
    elif update is not None:
        raise InvalidRequest(f"kwargs.update_info does not go with {body.method}", "kwargs.update_info")
    elif step == "start_weight_update":
        await state.engine.control.start_update()
    else:
        await state.engine.control.finish_update()
    return JSONResponse({"results": [None] * _world_size(state, include_dp=True)})


@router.post("/finish_session", responses=answers(FinishedSession, 400))
async def finish_session(request: Request, session_id: str) -> JSONResponse:
    """A roll-out of several turns is over: later requests with its name are a new session."""
    state_of(request).engine.forget_session(session_id)
    return JSONResponse({"session_id": session_id})


@router.get("/get_world_size", responses=answers(WorldSize, 400))
async def get_world_size(request: Request, include_dp: bool = True) -> JSONResponse:
    """How many workers there are."""
    return JSONResponse({"world_size": _world_size(state_of(request), include_dp)})


@router.get("/server_info", responses=error_responses(400, 503))
async def server_info(request: Request, config_format: Literal["json"] | None = None) -> Response:
    """What trainers read of vLLM's configuration; without config_format, as /get_server_info."""
    state = ready_state_of(request)
    if config_format is None:
        return write_server_info(state)
    config, limits = state.config, state.ready_limits()
    model: dict[str, Any] = {
        "model": state.model.name,
        "dtype": f"torch.{limits.dtype}",
        "max_model_len": limits.max_tokens_per_sequence,
        "logprobs_mode": _LOGPROBS_MODES[state.model.logprobs_mode],
    }
    parallel = {
        "tensor_parallel_size": config.tp_size,
        "pipeline_parallel_size": config.pp_size,
        "data_parallel_size": 1,  # what a route changes, every replica has: none is to be treated alone
    }
    adapters = None
    if not limits.no_adapters:
        adapters = {"max_lora_rank": max_adapter_rank(config), "max_loras": num_adapters(config)}
    others = {"lora_config": adapters, "weight_transfer_config": None}  # no transfers but by files
    return JSONResponse({"vllm_config": {"model_config": model, "parallel_config": parallel, **others}})


def _world_size(state: ServerState, include_dp: bool) -> int:
    config = state.config
    return num_workers(config) if include_dp else config.tp_size * config.pp_size


async def _update(state: ServerState, update: WeightsUpdate, prefix: str) -> str:
    """The version of the new weights. prefix: of the names of fields in errors. Raises InvalidRequest."""
    if update.weight_dir is None:
        raise InvalidRequest("weight_dir is required", "weight_dir")
    return await state.engine.control.update(
        update.weight_dir,
        update.version,
        is_partial=update.partial,
        clears_cache=update.clear_cache,
        mode=update.mode,
        param=f"{prefix}weight_dir",
    )


def _flag(request: Request, name: str) -> bool:
    """A parameter of the query, false if it is not there. Raises InvalidRequest."""
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} must be true or false", name)
    return value in ("true", "1")


def _version(state: ServerState) -> JSONResponse:
    return JSONResponse({"weight_version": state.engine.control.weight_version})
