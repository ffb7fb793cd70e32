"""POST /v1/completions"""

from fastapi import APIRouter, Request, Response

from tokasaurus.server.prepare.body import prepare_completion
from tokasaurus.server.protocol.completions import Completion, CompletionRequest
from tokasaurus.server.respond.stream import CompletionStream
from tokasaurus.server.respond.whole import build_completion
from tokasaurus.server.routes.generation import ERROR_RESPONSES, STREAMED, answer_generation
from tokasaurus.server.routes.json_body import JsonBodyRoute

router = APIRouter(route_class=JsonBodyRoute, tags=["generation"])


@router.post("/v1/completions", responses={200: {"model": Completion, "content": STREAMED}, **ERROR_RESPONSES})
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue one or more prompts, each `n` times."""
    return await answer_generation(request, body, prepare_completion, build_completion, CompletionStream)
