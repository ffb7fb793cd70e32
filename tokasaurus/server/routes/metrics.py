"""GET /metrics"""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from tokasaurus.monitoring.metrics import CONTENT_TYPE_LATEST, EngineCollector, render_metrics
from tokasaurus.server.batches.service import find_batches
from tokasaurus.server.state import state_of

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus text; no samples until the engine is up."""
    state, service = state_of(request), find_batches(request)
    batches = None if service is None else service.stats()
    engine = state.engine
    collector = EngineCollector(
        *(lambda: engine.stats, lambda: engine.num_restarts, state.loop_lag, batches, lambda: engine.switched_off)
    )
    return Response(render_metrics(collector), media_type=CONTENT_TYPE_LATEST)
