"""Request bodies prepared for the engine."""

from typing import Any

import numpy as np

from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.prepare.chat import draft_chat
from tokasaurus.server.prepare.completion import draft_completion
from tokasaurus.server.prepare.requests import Origin, Prepared
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.served_model import ServedModel

LIMITS = EngineLimits(num_kv_blocks=10, page_size=16, max_tokens_per_sequence=100)


def completion(model: ServedModel, client: str = "", **fields: Any) -> Prepared:
    body = CompletionRequest.model_validate({"model": "default", "prompt": "abc"} | fields)
    return draft_completion(body, model, LIMITS, Origin(client=client)).prepared


def chat(model: ServedModel, *contents: str, client: str = "", **fields: Any) -> Prepared:
    messages = [{"role": "user", "content": content} for content in contents or ("abc",)]
    body = ChatCompletionRequest.model_validate({"model": "default", "messages": messages} | fields)
    return draft_chat(body, model, LIMITS, Origin(client=client)).prepared


def prompts_of(prepared: Prepared) -> list[list[int]]:
    assert all(request.prompt_ids.dtype == np.int32 for request in prepared.requests)
    return [request.prompt_ids.tolist() for request in prepared.requests]
