"""Roll-outs by SGLang's names: text and tokens, pauses, new weights. Served with rl=T."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime, timezone
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tokasaurus import __version__
from tokasaurus.server.access import client_of, session_of
from tokasaurus.server.endpoints import Endpoint, StreamedAnswer
from tokasaurus.server.errors import Conflict, EngineNotReady, InvalidRequest, naming_fields
from tokasaurus.server.openapi import BODY_ERRORS, error_responses, example_body
from tokasaurus.server.prepare.completion import draft_completion
from tokasaurus.server.prepare.requests import Origin, Prepared
from tokasaurus.server.prepare.rollouts import completion_of_generate, default_new_tokens, generate_fields
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.protocol.sglang_rollouts import (
    AbortRequest,
    ContinueGenerationRequest,
    GenerateAnswer,
    GenerateRequest,
    Loads,
    MemoryRequest,
    PauseGenerationRequest,
    ReplicaLoad,
    Success,
    UpdateFromDiskRequest,
    UpdateSuccess,
)
from tokasaurus.server.protocol.vllm_rollouts import PauseMode, WeightVersion
from tokasaurus.server.respond.sglang_rollouts import GenerateStream, build_generate_answer
from tokasaurus.server.routes.event_stream import EventStream, run_while_connected
from tokasaurus.server.routes.json_body import JsonBodyRoute
from tokasaurus.server.state import ServerState, num_body_bytes, ready_state_of, state_of
from tokasaurus.text.json_lines import write_json

router = APIRouter(route_class=JsonBodyRoute, tags=["roll-outs"])

PROBE_SECONDS = 20.0
"""Longest time for the token of /health_generate."""

_STREAMED = {"text/event-stream": {"schema": {"description": "Answers so far as server-sent events."}}}
_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}
_LOADS_SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})


@router.post(
    "/generate",
    responses={
        200: {"model": GenerateAnswer, "content": _STREAMED},
        **error_responses(*BODY_ERRORS, 404, 429, 503),
    },
    openapi_extra=example_body({"text": "Once upon a time", "sampling_params": {"max_new_tokens": 20}}),
)
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Continue one prompt."""
    state = state_of(request)
    session = session_of(request) if body.session_id is None else body.session_id
    origin = Origin(num_body_bytes(request), client_of(request), session=session)
    endpoint = _endpoint(body)
    names = generate_fields(body)

    async def prepare() -> Prepared:
        with naming_fields(names):
            return await endpoint.prepare(state, completion_of_generate(body), origin)

    if body.stream:
        prepared = await run_while_connected(request.receive, prepare())
        return EventStream(_named_events(endpoint, state, body, prepared))

    async def answer() -> bytes:
        prepared = await prepare()
        with state.rollouts.named(body.rid, prepared.requests), naming_fields(names):
            return (await endpoint.answer_prepared(state, prepared)).content

    return _json(await run_while_connected(request.receive, answer()))


def _endpoint(body: GenerateRequest) -> Endpoint[CompletionRequest]:
    draft = partial(draft_completion, default_tokens=default_new_tokens(body), may_only_score=True)
    return Endpoint(
        CompletionRequest, draft, partial(build_generate_answer, body), partial(GenerateStream, body), False
    )


async def _named_events(
    endpoint: Endpoint[CompletionRequest], state: ServerState, body: GenerateRequest, prepared: Prepared
) -> AsyncGenerator[bytes, None]:
    with state.rollouts.named(body.rid, prepared.requests):
        async with aclosing(StreamedAnswer(endpoint, state, prepared, StreamOptions()).events()) as events:
            async for event in events:
                yield event


@router.post("/pause_generation", responses={200: {"model": Success}, **error_responses(*BODY_ERRORS, 503)})
async def pause_generation(request: Request, body: PauseGenerationRequest) -> Response:
    """Returns when no step runs; new requests wait."""
    await ready_state_of(request).rollouts.pause(_MODES[body.mode], clears_cache=False)
    return _json(write_json(Success(True, "paused")))


@router.post("/continue_generation", responses={200: {"model": Success}, **error_responses(*BODY_ERRORS, 503)})
async def continue_generation(
    request: Request,
    body: ContinueGenerationRequest,  # noqa: ARG001  (it has been checked)
) -> Response:
    """Go on after /pause_generation. Does nothing unless the engine is paused."""
    await ready_state_of(request).rollouts.resume()
    return _json(write_json(Success(True, "goes on")))


@router.post("/abort_request", responses={200: {"model": Success}, **error_responses(*BODY_ERRORS, 503)})
async def abort_request(request: Request, body: AbortRequest) -> Response:
    """End requests by "abort" with the tokens that they have; others go on."""
    if body.abort_all or body.rid:
        await ready_state_of(request).rollouts.abort(None if body.abort_all else body.rid)
    return _json(write_json(Success(True, "aborted")))


@router.post(
    "/update_weights_from_disk", responses={200: {"model": UpdateSuccess}, **error_responses(*BODY_ERRORS, 503)}
)
async def update_weights_from_disk(request: Request, body: UpdateFromDiskRequest) -> Response:
    """Replace the model's weights in place, on every replica."""
    state = ready_state_of(request)
    rollouts = state.rollouts
    mode: PauseMode = "abort" if body.abort_all_requests or body.abort_all_request else "wait"
    if body.keep_pause:
        await rollouts.pause(mode, clears_cache=False)
        mode = "keep"
    version = await rollouts.update(body.model_path, body.weight_version, False, body.flush_cache, mode, "model_path")
    kept = state.engine.num_pending_requests
    return _json(write_json(UpdateSuccess(True, f"the weights are {version}", kept, version)))


@router.get("/get_weight_version", responses={200: {"model": WeightVersion}})
async def get_weight_version(request: Request) -> JSONResponse:
    """The name of the newest weights."""
    return JSONResponse({"weight_version": state_of(request).rollouts.weight_version})


@router.get("/flush_cache", responses={200: {"model": Success}, **error_responses(409, 503)})
@router.post("/flush_cache", responses={200: {"model": Success}, **error_responses(409, 503)})
async def flush_cache(request: Request) -> Response:
    """Forget the KV of all prompts; 409 while any request is unfinished."""
    if not await ready_state_of(request).rollouts.clear_cache_if_idle():
        raise Conflict("requests are running or waiting: the cache was not flushed")
    return _json(write_json(Success(True, "flushed")))


@router.post(
    "/release_memory_occupation", responses={200: {"model": Success}, **error_responses(*BODY_ERRORS, 409, 503)}
)
async def release_memory_occupation(request: Request, body: MemoryRequest) -> Response:
    """Give memory back to the system until /resume_memory_occupation; requests wait. The memory of the weights can be
    given back only together with the KV cache's, or after it."""
    rollouts = ready_state_of(request).rollouts
    if not body.chosen:
        if ready_state_of(request).ready_limits().device == "cuda":
            raise Conflict("the engine goes on: the memory of CUDA graphs is not given back")
        return _json(write_json(Success(True, "there are no CUDA graphs on a CPU")))
    if "kv_cache" not in body.chosen and not rollouts.is_asleep:
        raise InvalidRequest('tags: "weights" goes only with or after "kv_cache"', "tags")
    await rollouts.sleep("keep", with_weights="weights" in body.chosen, refuses=False)
    return _json(write_json(Success(True, "released")))


@router.post(
    "/resume_memory_occupation", responses={200: {"model": Success}, **error_responses(*BODY_ERRORS, 409, 503)}
)
async def resume_memory_occupation(request: Request, body: MemoryRequest) -> Response:
    """Take the memory again, all of it whatever the tags; requests go on once "kv_cache" is among them."""
    rollouts = ready_state_of(request).rollouts
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
            "weight_version": state.rollouts.weight_version,
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
        "max_total_num_tokens": limits.num_kv_blocks * limits.page_size,
        "page_size": limits.page_size,
        "max_running_requests": config.max_seqs_per_forward,
        "tp_size": config.tp_size,
        "pp_size": config.pp_size,
        "dp_size": config.dp_size,
        "ep_size": 1,
        "nnodes": 1,
        "node_rank": 0,
        "weight_version": state.rollouts.weight_version,
        "version": __version__,
        "internal_states": _loads(state),
    }
    return _json(write_json(info))


@router.get("/health_generate", responses=error_responses(503))
async def health_generate(request: Request) -> Response:
    """The engine computes a token, or is paused and would."""
    state = ready_state_of(request)
    state.check_ready()
    if not state.rollouts.is_paused:
        probe = GenerateRequest.model_validate({"input_ids": [0], "sampling_params": {"max_new_tokens": 1}})
        work = _endpoint(probe).answer(state, completion_of_generate(probe), Origin(client=client_of(request)))
        try:
            await asyncio.wait_for(work, PROBE_SECONDS)
        except asyncio.TimeoutError:
            if not state.rollouts.is_paused:
                raise EngineNotReady(f"the engine computed no token in {PROBE_SECONDS:.0f} s") from None
    return _json(write_json(Success(True, "healthy")))


@router.get("/v1/loads", responses={200: {"model": Loads}, **error_responses(400, 503)})
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
            num_used_tokens=num_blocks * limits.page_size,
            max_total_num_tokens=limits.num_kv_blocks * limits.page_size,
            token_usage=num_blocks / limits.num_kv_blocks,
        )
        found.append(load)
    return found


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
