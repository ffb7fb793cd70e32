"""GET /health, /ready, /ping, /version, /metrics and /live"""

import importlib.metadata
import platform
from functools import cache

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from tokasaurus import __version__
from tokasaurus.monitoring.metrics import CONTENT_TYPE_LATEST, EngineCollector, VllmLabels, render_metrics
from tokasaurus.server.errors import ServerStopping
from tokasaurus.server.event_stream import HEADERS, EventStream
from tokasaurus.server.jobs.service import find_batches
from tokasaurus.server.live import LiveFeed
from tokasaurus.server.openapi import error_responses
from tokasaurus.server.protocol.live import LiveEvent
from tokasaurus.server.state import ServerState, is_head, state_of

router = APIRouter(tags=["health"])


@router.get("/health")
async def health() -> JSONResponse:
    """The HTTP server is alive, whatever the state of the engine."""
    return JSONResponse({"status": "ok"})


@router.get("/ready", responses=error_responses(503))
async def ready(request: Request) -> JSONResponse:
    """At least one replica is up; 503 until all have been, while none is, and from a stop signal on."""
    state = state_of(request)
    state.check_ready()
    stats = state.engine.stats
    num_up = sum(one is not None for one in stats)
    return JSONResponse({"status": "ready", "replicas": len(stats), "replicas_up": num_up})


@router.get("/ping")
async def ping() -> JSONResponse:
    """The HTTP server answers requests that have the key, if it has one."""
    return JSONResponse({"message": "pong"})


@router.get("/version")
async def version() -> JSONResponse:
    """The version of this server."""
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus text; no samples until the engine is up."""
    state, service = state_of(request), find_batches(request)
    batches = None if service is None else service.stats()
    engine = state.engine
    collector = EngineCollector(
        read_stats=lambda: engine.stats,
        read_restarts=lambda: engine.num_restarts,
        loop_lag=state.loop_lag,
        batches=batches,
        read_switched_off=lambda: engine.switched_off,
        requests=engine.request_metrics,
        answers=state.answers,
        build=_build(state),
        vllm=_vllm_labels(state) if state.config.vllm_metrics else None,
        num_server_restarts=engine.num_server_restarts,
        adapters={one.name: one.digest for one in engine.control.adapters.named},
    )
    return Response(render_metrics(collector), media_type=CONTENT_TYPE_LATEST)


def _vllm_labels(state: ServerState) -> VllmLabels:
    page_size = 0 if state.engine.limits is None else state.engine.limits.page_size
    return VllmLabels(state.model.name, page_size, state.config.kv_cache_dtype or "auto")


def _build(state: ServerState) -> dict[str, str]:
    """Labels of toka_build_info. Those that the worker tells are empty until the engine is up."""
    limits = state.engine.limits
    return {
        "version": __version__,
        "model": state.model.name,
        "dtype": "" if limits is None else limits.dtype,
        "device": "" if limits is None else limits.device,
        "torch": _torch_version(),
        "python": platform.python_version(),
    }


@cache
def _torch_version() -> str:
    """Without importing it."""
    return importlib.metadata.version("torch")


@router.get(
    "/live",
    responses={
        200: {"model": LiveEvent, "description": "Server-sent events, each with `data: ` and one object in a line."},
        **error_responses(503),
    },
)
async def live(request: Request) -> Response:
    """What the server does, once a second, whatever the state of the engine, until the server stops."""
    if state_of(request).engine.is_draining:
        raise ServerStopping("the server is stopping")
    if is_head(request.scope):
        return Response(media_type=EventStream.media_type, headers=HEADERS)
    feed: LiveFeed = request.app.state.live
    return EventStream(feed.listen())
