"""POST /v1/chat/completions"""

from fastapi import APIRouter, Request, Response

from tokasaurus.server.prepare.body import prepare_chat
from tokasaurus.server.protocol.chat import ChatCompletion, ChatCompletionRequest
from tokasaurus.server.respond.stream import ChatStream
from tokasaurus.server.respond.whole import build_chat_completion
from tokasaurus.server.routes.generation import ERROR_RESPONSES, STREAMED, answer_generation
from tokasaurus.server.routes.json_body import JsonBodyRoute

router = APIRouter(route_class=JsonBodyRoute, tags=["generation"])


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, "content": STREAMED}, **ERROR_RESPONSES})
async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Generate `n` answers to a conversation, formatted with the model's chat template."""
    return await answer_generation(request, body, prepare_chat, build_chat_completion, ChatStream)
