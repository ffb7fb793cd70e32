"""GET /metrics"""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from tokasaurus.monitoring.metrics import CONTENT_TYPE_LATEST, EngineCollector, render_metrics
from tokasaurus.server.state import state_of

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus text; no samples until the engine is up."""
    state = state_of(request)
    collector = EngineCollector(lambda: state.engine.stats, lambda: state.engine.num_restarts, state.loop_lag)
    return Response(render_metrics(collector), media_type=CONTENT_TYPE_LATEST)
