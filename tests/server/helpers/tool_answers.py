"""Answers with tool calls from a fake engine, read by the real OpenAI client unstreamed and streamed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import openai
import pydantic
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import Choice

from tests.helpers.small_tokenizer import IM_END
from tests.server.helpers.fake_engine import FakeEngine, Reply, Script
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.openai_client import assert_exactly_openai_shaped, assert_no_extra_fields, sync_client
from tests.server.helpers.tool_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE, OWN_WAY_TEMPLATE, save_tokenizer_with
from tokasaurus.messages.generation import FinishReason, GenerateRequest
from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.tools.formats import HERMES, LLAMA3
from tokasaurus.server.tools.support import find_tool_support
from tokasaurus.text.tokenizer import Tokenizer

QUESTION: list[Any] = [{"role": "user", "content": "Warm there?"}]


class GetWeather(pydantic.BaseModel):
    """The weather in a city."""

    city: str
    days: int = 1


TOOLS: list[Any] = [
    openai.pydantic_function_tool(GetWeather, name="get_weather"),
    {"type": "function", "function": {"name": "get_time", "description": "The time."}},
]
LIMITS = EngineLimits(num_kv_blocks=512, page_size=16, max_tokens_per_sequence=4096)


def tool_server(template: str, model: ServedModel, directory: Path) -> Any:
    """template: the name of one of ours, or Jinja."""
    if template != "no template":
        templates = {"hermes": HERMES_TEMPLATE, "llama3": LLAMA3_TEMPLATE, "unknown format": OWN_WAY_TEMPLATE}
        tokenizer = Tokenizer.load(save_tokenizer_with(templates.get(template, template), directory))
        support = find_tool_support(tokenizer, None)
        model = dataclasses.replace(model, tokenizer=tokenizer, find_tools=lambda: support)
    return live_server(model, FakeEngine(limits=LIMITS))


def say(*texts: str, finish_reason: FinishReason = "stop") -> Script:
    """Sample i of a request answers texts[i], with one token per byte."""

    def script(request: GenerateRequest, index: int) -> Reply:
        token_ids = [*texts[index].encode(), *([IM_END] if finish_reason == "stop" else [])]
        logprobs = [-float(position) for position in range(len(token_ids))] if request.want_logprobs else None
        return Reply(token_ids, logprobs, finish_reason)

    return script


def write_calls(server: LiveServer, *calls: tuple[str, dict[str, Any]]) -> str:
    is_llama = "parameters" in server.http.get("/tokenizer_info").json()["chat_template"]
    format_ = LLAMA3 if is_llama else HERMES
    return format_.separator.join(format_.write(name, arguments) for name, arguments in calls)


def without_ids(choice: Choice) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads(choice.model_dump_json(exclude={"index"}))
    for call in expected["message"]["tool_calls"] or []:
        assert call.pop("id").startswith("call_")
    return expected


def ask(server: LiveServer, **fields: Any) -> ChatCompletion:
    """The unstreamed answer, after asserting that streams with small and large deltas join to the same choices."""
    fields = {"model": "default", "messages": QUESTION, "tools": TOOLS} | fields
    client = sync_client(server)
    raw = client.chat.completions.with_raw_response.create(**fields)
    assert_exactly_openai_shaped(raw.content, ChatCompletion)
    answer: ChatCompletion = raw.parse()
    for delta_size in (1, 7, 10_000):
        server.engine.delta_size = delta_size
        chunks = list(client.chat.completions.create(**fields, stream=True))
        for chunk in chunks:
            assert_no_extra_fields(chunk)
        for choice in answer.choices:
            assert joined(chunks, choice.index) == without_ids(choice)
    return answer


def joined(chunks: list[ChatCompletionChunk], index: int) -> dict[str, Any]:
    """A choice joined from its chunks as OpenAI's guide describes, without the call ids."""
    message: dict[str, Any] = {"content": None, "refusal": None, "role": None, "tool_calls": None}
    message |= {"annotations": None, "audio": None, "function_call": None}
    logprobs: list[Any] | None = None
    finish_reason = None
    ids = set()
    for choice in (choice for chunk in chunks for choice in chunk.choices if choice.index == index):
        assert finish_reason is None, "a chunk follows the one with the finish_reason"
        finish_reason = choice.finish_reason
        message["role"] = message["role"] or choice.delta.role
        if choice.delta.content is not None:
            message["content"] = (message["content"] or "") + choice.delta.content
        for fragment in choice.delta.tool_calls or []:
            calls = message["tool_calls"] = message["tool_calls"] or []
            if fragment.id is not None:
                assert fragment.index == len(calls)
                assert fragment.function is not None
                assert fragment.function.arguments == ""
                calls.append({"function": {"arguments": "", "name": fragment.function.name}, "type": fragment.type})
                ids.add(fragment.id)
            assert fragment.function is not None
            calls[fragment.index]["function"]["arguments"] += fragment.function.arguments
        if choice.logprobs is not None:
            logprobs = (logprobs or []) + json.loads(choice.logprobs.model_dump_json())["content"]
    assert len(ids) == len(message["tool_calls"] or [])
    content = None if logprobs is None else {"content": logprobs, "refusal": None}
    return {"finish_reason": finish_reason, "logprobs": content, "message": message}
