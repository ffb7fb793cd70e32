"""OpenAI's client, and checks that answers match its types exactly."""

from typing import Any

import openai
import pydantic

from tests.helpers.small_tokenizer import IM_END
from tests.server.helpers.fake_engine import Reply
from tests.server.helpers.live_server import LiveServer
from tokasaurus.messages.generation import GenerateRequest


def sync_client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


OUR_FIELDS = {
    "Model": {"max_model_len", "root", "parent"},
    "Response": {"store"},  # which OpenAI's answers have, and its types have not
    "PromptTokensDetails": {"computed_tokens", "shared_tokens", "recomputed_tokens"},
}

OUR_OPTIONAL_FIELDS = {"Batch": {"progress"}}


def assert_exactly_openai_shaped(content: bytes, model: type[pydantic.BaseModel]) -> None:
    """Asserts at any depth that each field has OpenAI's type, and that fields unknown to OpenAI are in OUR_FIELDS."""
    assert_no_extra_fields(model.model_validate_json(content, strict=True))


def assert_no_extra_fields(value: Any) -> None:
    if isinstance(value, pydantic.BaseModel):
        name, extra = type(value).__name__, set(value.model_extra or {})
        assert extra - OUR_OPTIONAL_FIELDS.get(name, set()) == OUR_FIELDS.get(name, set())
        for name in type(value).model_fields:
            assert_no_extra_fields(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            assert_no_extra_fields(item)


def say_hello(request: GenerateRequest, index: int) -> Reply:
    token_ids = [259, ord("0") + index, *"€".encode(), IM_END]
    logprobs = [-0.5] * len(token_ids) if request.want_logprobs else None
    return Reply(token_ids, logprobs, "stop", 1, num_computed_tokens=2, num_recomputed_tokens=30, num_shared_tokens=400)
