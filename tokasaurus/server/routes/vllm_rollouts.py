"""Roll-outs by vLLM's names: tokens in and out, pauses, new weights. Served with rl=T."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from tokasaurus.messages.generation import LogprobsMode
from tokasaurus.server.access import client_of, session_of
from tokasaurus.server.endpoints import Endpoint
from tokasaurus.server.errors import InvalidRequest, UnsupportedField, naming_fields
from tokasaurus.server.openapi import BODY_ERRORS, error_responses, example_body
from tokasaurus.server.prepare.completion import draft_completion
from tokasaurus.server.prepare.requests import Origin
from tokasaurus.server.prepare.rollouts import TOKENS_FIELDS, completion_of_tokens
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.protocol.vllm_rollouts import (
    CacheReset,
    FinishedSession,
    FinishUpdateRequest,
    InitTransferRequest,
    Level,
    PauseMode,
    PauseState,
    ResetCacheRequest,
    RpcRequest,
    RpcResults,
    SleepState,
    StartUpdateRequest,
    TokensAnswer,
    TokensRequest,
    UpdateWeightsRequest,
    WeightsUpdate,
    WeightVersion,
    WorldSize,
)
from tokasaurus.server.respond.stream import CompletionStream
from tokasaurus.server.respond.vllm_rollouts import build_tokens_answer
from tokasaurus.server.routes.event_stream import run_while_connected
from tokasaurus.server.routes.json_body import JsonBodyRoute
from tokasaurus.server.routes.sglang_rollouts import write_server_info
from tokasaurus.server.state import ServerState, num_body_bytes, ready_state_of, state_of

MemoryTags = Annotated[list[Literal["kv_cache", "weights"]] | None, Query()]

router = APIRouter(route_class=JsonBodyRoute, tags=["roll-outs"])

_draft = partial(draft_completion, default_tokens=None)
_LOGPROBS_MODES: Mapping[LogprobsMode, str] = {"raw": "raw_logprobs", "sampled": "processed_logprobs"}
"""vLLM's names of logprobs_mode."""


@router.post(
    "/inference/v1/generate",
    responses={200: {"model": TokensAnswer}, **error_responses(*BODY_ERRORS, 404, 429, 503)},
    openapi_extra=example_body({"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 20}}),
)
async def generate(request: Request, body: TokensRequest) -> Response:
    """Continue the tokens of one prompt, `n` times."""
    state = state_of(request)
    origin = Origin(num_body_bytes(request), client_of(request), session=session_of(request))
    endpoint = Endpoint(CompletionRequest, _draft, partial(build_tokens_answer, body), CompletionStream, False)
    with naming_fields(TOKENS_FIELDS):
        work = endpoint.answer(state, completion_of_tokens(body), origin)
        answer = await run_while_connected(request.receive, work)
    return Response(answer.content, media_type="application/json")


@router.post("/pause", responses={200: {"model": PauseState}, **error_responses(400, 503)})
async def pause(
    request: Request,
    mode: PauseMode = "abort",
    clear_cache: bool = True,
    wait_for_inflight_requests: bool = False,
) -> JSONResponse:
    """Returns when no step runs; new requests wait. mode: running requests are ended by "abort" with the tokens that
    they have, waited for, or kept until /resume. clear_cache: forget the KV of all prompts.
    wait_for_inflight_requests: an older word for the mode "wait"."""
    await ready_state_of(request).rollouts.pause("wait" if wait_for_inflight_requests else mode, clear_cache)
    return JSONResponse({"is_paused": True})


@router.post("/resume", responses={200: {"model": PauseState}, **error_responses(503)})
async def resume(request: Request) -> JSONResponse:
    """Go on after /pause. Does nothing unless the engine is paused."""
    await ready_state_of(request).rollouts.resume()
    return JSONResponse({"is_paused": False})


@router.get("/is_paused", responses={200: {"model": PauseState}})
async def is_paused(request: Request) -> JSONResponse:
    """Whether /pause has paused the engine."""
    return JSONResponse({"is_paused": state_of(request).rollouts.is_paused})


@router.post("/sleep", responses={200: {"model": SleepState}, **error_responses(400, 409, 503)})
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
    rollouts = ready_state_of(request).rollouts
    if tags and "kv_cache" not in tags and not rollouts.is_asleep:
        raise InvalidRequest('tags: "weights" goes only with or after "kv_cache"', "tags")
    await rollouts.sleep(mode, with_weights="weights" in tags if tags else level == "2", refuses=refuse)
    return JSONResponse({"is_sleeping": True})


@router.post("/wake_up", responses={200: {"model": SleepState}, **error_responses(409, 503)})
async def wake_up(request: Request, tags: MemoryTags = None) -> JSONResponse:
    """Take the memory again, all of it whatever the tags, and go on if kv_cache is among them or there are none. Does
    nothing unless the engine sleeps."""
    await ready_state_of(request).rollouts.wake(stays_paused=bool(tags and "kv_cache" not in tags))
    return JSONResponse({"is_sleeping": False})


@router.get("/is_sleeping", responses={200: {"model": SleepState}})
async def is_sleeping(request: Request) -> JSONResponse:
    """Whether the engine has given memory back to the system."""
    return JSONResponse({"is_sleeping": state_of(request).rollouts.is_asleep})


@router.post("/reset_prefix_cache", responses={200: {"model": CacheReset}, **error_responses(*BODY_ERRORS, 409, 503)})
async def reset_prefix_cache(request: Request, body: ResetCacheRequest) -> JSONResponse:
    """Forget the KV of all prompts; 409 while requests run, unless they are reset. The fields may be in the query."""
    rollouts = ready_state_of(request).rollouts
    if _flag(request, "reset_external"):
        raise UnsupportedField("reset_external is not implemented: no cache lies outside the server", "reset_external")
    await rollouts.clear_cache(body.reset_running_requests or _flag(request, "reset_running_requests"))
    return JSONResponse({"is_paused": rollouts.is_paused, "success": True})


@router.post("/update_weights", responses={200: {"model": WeightVersion}, **error_responses(*BODY_ERRORS, 503)})
async def update_weights(request: Request, body: UpdateWeightsRequest) -> JSONResponse:
    """Replace the model's weights in place, on every replica."""
    state = ready_state_of(request)
    update: WeightsUpdate = body if body.update_info is None else body.update_info
    prefix = "" if body.update_info is None else "update_info."
    if body.update_info is not None and body.weight_dir is not None:
        raise InvalidRequest("weight_dir and update_info: only one of them may be given", "update_info")
    return JSONResponse({"weight_version": await _update(state, update, prefix)})


@router.post("/init_weight_transfer_engine", responses={200: {"model": WeightVersion}, **error_responses(*BODY_ERRORS)})
async def init_weight_transfer_engine(request: Request, body: InitTransferRequest) -> JSONResponse:  # noqa: ARG001  (it has been checked)
    """Whether weights can come as the trainer sends them: files in a directory can, and nothing has to be set up."""
    return _version(state_of(request))


@router.post("/start_weight_update", responses={200: {"model": WeightVersion}, **error_responses(*BODY_ERRORS, 503)})
async def start_weight_update(request: Request, body: StartUpdateRequest) -> JSONResponse:  # noqa: ARG001  (it has been checked)
    """The following /update_weights are parts of one update, until /finish_weight_update; no step runs meanwhile."""
    state = ready_state_of(request)
    await state.rollouts.start_update()
    return _version(state)


@router.post("/finish_weight_update", responses={200: {"model": WeightVersion}, **error_responses(*BODY_ERRORS, 503)})
async def finish_weight_update(request: Request, body: FinishUpdateRequest) -> JSONResponse:
    """The end of the update; resumes an engine that /start_weight_update has paused."""
    state = ready_state_of(request)
    version = state.rollouts.weight_version
    if body.weight_version not in (None, version):
        reason = f"weight_version must be {version!r}: update_info.version of /update_weights names the weights"
        raise InvalidRequest(reason, "weight_version")
    await state.rollouts.finish_update()
    return _version(state)


@router.post("/collective_rpc", responses={200: {"model": RpcResults}, **error_responses(*BODY_ERRORS, 503)})
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
        await state.rollouts.start_update()
    else:
        await state.rollouts.finish_update()
    return JSONResponse({"results": [None] * _world_size(state, include_dp=True)})


@router.post("/finish_session", responses={200: {"model": FinishedSession}, **error_responses(400)})
async def finish_session(request: Request, session_id: str) -> JSONResponse:
    """A roll-out of several turns is over: later requests with its name are a new session."""
    state_of(request).rollouts.forget_session(session_id)
    return JSONResponse({"session_id": session_id})


@router.get("/get_world_size", responses={200: {"model": WorldSize}, **error_responses(400)})
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
        "data_parallel_size": config.dp_size,
    }
    absent = {"lora_config": None, "weight_transfer_config": None}  # no adapters, and no transfers but by files
    return JSONResponse({"vllm_config": {"model_config": model, "parallel_config": parallel, **absent}})


def _world_size(state: ServerState, include_dp: bool) -> int:
    config = state.config
    return config.tp_size * config.pp_size * (config.dp_size if include_dp else 1)


async def _update(state: ServerState, update: WeightsUpdate, prefix: str) -> str:
    """The version of the new weights. prefix: of the names of fields in errors. Raises InvalidRequest."""
    if update.weight_dir is None:
        raise InvalidRequest("weight_dir is required", "weight_dir")
    arguments = (update.weight_dir, update.version, update.partial, update.clear_cache, update.mode)
    return await state.rollouts.update(*arguments, f"{prefix}weight_dir")


def _flag(request: Request, name: str) -> bool:
    """A parameter of the query, false if it is not there. Raises InvalidRequest."""
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} must be true or false", name)
    return value in ("true", "1")


def _version(state: ServerState) -> JSONResponse:
    return JSONResponse({"weight_version": state.rollouts.weight_version})
