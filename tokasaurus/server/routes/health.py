"""GET /health, /ready, /ping, /version"""

import importlib.metadata

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from tokasaurus.server.openapi import error_responses
from tokasaurus.server.state import state_of

router = APIRouter(tags=["health"])


@router.get("/health")
async def health() -> JSONResponse:
    """The HTTP server is alive, whatever the state of the engine."""
    return JSONResponse({"status": "ok"})


@router.get("/ready", responses=error_responses(503))
async def ready(request: Request) -> JSONResponse:
    """The engine is up; 503 until then, while it restarts, and from a stop signal on."""
    state_of(request).check_ready()
    return JSONResponse({"status": "ready"})


@router.get("/ping")
async def ping() -> JSONResponse:
    return JSONResponse({"message": "pong"})


@router.get("/version")
async def version() -> JSONResponse:
    return JSONResponse({"version": importlib.metadata.version("tokasaurus")})
