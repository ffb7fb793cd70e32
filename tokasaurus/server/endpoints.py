"""The endpoints that generate text, or make vectors and scores, for live requests and the lines of bulk requests and
batches.

To add one: a file in `dialects`, from its body to its answer, and its entry in ENDPOINTS or POOLING_ENDPOINTS.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from tokasaurus.server.dialects import messages, pairs, responses, vectors
from tokasaurus.server.endpoint import RoutedEndpoint
from tokasaurus.server.prepare.chat import draft_chat
from tokasaurus.server.prepare.completion import draft_completion
from tokasaurus.server.protocol.chat import ChatCompletion, ChatCompletionRequest
from tokasaurus.server.protocol.completions import Completion, CompletionRequest
from tokasaurus.server.respond.stream import ChatStream, CompletionStream
from tokasaurus.server.respond.whole import build_chat_completion, build_completion

ENDPOINTS: Mapping[str, RoutedEndpoint[Any]] = {
    "/v1/completions": RoutedEndpoint(
        body_model=CompletionRequest,
        draft=draft_completion,
        build=build_completion,
        stream=CompletionStream,
        renders_template=False,
        name="create_completion",
        description="Continue one or more prompts, each `n` times.",
        operation="text_completion",
        answer_model=Completion,
        example={"prompt": "Once upon a time", "max_tokens": 50},
    ),
    "/v1/chat/completions": RoutedEndpoint(
        body_model=ChatCompletionRequest,
        draft=draft_chat,
        build=build_chat_completion,
        stream=ChatStream,
        renders_template=True,
        name="create_chat_completion",
        description="Generate `n` answers to a conversation, formatted with the model's chat template.",
        operation="chat",
        answer_model=ChatCompletion,
        example={"messages": [{"role": "user", "content": "What do whales eat?"}], "max_tokens": 100},
    ),
    "/v1/responses": responses.ENDPOINT,
    "/v1/messages": messages.ENDPOINT,
}
"""Those that generate text, by path, in the order of the OpenAPI page."""

POOLING_ENDPOINTS: Mapping[str, RoutedEndpoint[Any]] = {
    "/v1/embeddings": vectors.EMBEDDINGS,
    "/v1/rerank": pairs.RERANK,
    "/v1/score": pairs.SCORE,
    "/classify": vectors.CLASSIFY,
    "/pooling": vectors.POOLING,
    "/get_reward": vectors.REWARDS,
}
"""Of servers that compute vectors or scores of texts, in place of answers: see the flag task."""

ALL_ENDPOINTS = {**ENDPOINTS, **POOLING_ENDPOINTS}

if TYPE_CHECKING:
    EndpointUrl = str
else:
    EndpointUrl = Literal[tuple(sorted(ALL_ENDPOINTS))]
"""Type of a line's url."""
