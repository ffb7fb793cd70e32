"""/v1/responses through OpenAI's client, whole and streamed, compared with chat."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pydantic
import pytest
from openai.types.responses import ResponseFunctionToolCall

from tests.helpers.small_tokenizer import IM_END
from tests.server.helpers.bodies_and_errors import assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import FakeEngine, Reply
from tests.server.helpers.grammar_script import follow_grammars
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.openai_client import sync_client
from tests.server.helpers.response_events import (
    checked_events,
    checked_response,
    joined_response,
    without_random_fields,
)
from tests.server.helpers.tool_answers import TOOLS as CHAT_TOOLS
from tests.server.helpers.tool_answers import GetWeather, say, tool_server, write_calls
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.protocol.known_fields import KNOWN_FIELDS
from tokasaurus.server.served_model import ServedModel

ROUTE = "/v1/responses"
TOOLS: list[Any] = [
    openai.pydantic_function_tool(GetWeather, name="get_weather")["function"] | {"type": "function"},
    {"type": "function", "name": "get_time", "description": "The time.", "parameters": None, "strict": False},
]


@pytest.fixture(scope="module")
def tool_live(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with tool_server("hermes", served_model, tmp_path_factory.mktemp("tokenizer")) as live:
        yield live


def ask(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """The whole answer, after asserting that streams with small and large deltas add up to it."""
    body = {"model": "default", "input": "Warm there?"} | fields
    answer = server.http.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    whole = checked_response(answer.content)
    for delta_size in (1, 7, 10_000):
        server.engine.delta_size = delta_size
        streamed = server.http.post(ROUTE, json=body | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        joined = joined_response(checked_events(streamed.content))
        assert without_random_fields(joined) == without_random_fields(whole)
    return whole


def prompt_of(server: LiveServer, route: str, **fields: Any) -> list[int]:
    answer = server.http.post(route, json={"model": "default"} | fields)
    assert answer.status_code == 200, answer.text
    return server.engine.requests[-1].prompt_ids.tolist()


def test_every_event_is_read_by_openais_clients(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.engine.script = say("Hello é there")
    has_begun = threading.Event()  # so that the answer comes in several deltas, however slow the client is
    monkeypatch.setattr(server.engine, "before_update", lambda: has_begun.wait(60))
    client = sync_client(server)
    answer = client.responses.create(model="default", input="hello")
    assert (answer.output_text, answer.status) == ("Hello é there", "completed")
    with client.responses.stream(model="default", input=[{"role": "user", "content": "hello"}]) as stream:
        deltas = []
        for event in stream:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
                has_begun.set()
        assert stream.get_final_response().output_text == "".join(deltas) == "Hello é there"
    assert len(deltas) > 1

    async def read() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as async_client:
            events = await async_client.responses.create(model="default", input="hello", stream=True)
            return "".join([event.delta async for event in events if event.type == "response.output_text.delta"])

    assert asyncio.run(read()) == "Hello é there"


def test_the_answer_repeats_the_body(server: LiveServer) -> None:
    fields = {
        "instructions": "Be short.",
        "max_output_tokens": 9,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.75,
        "user": "me",
        "prompt_cache_key": "key",
        "safety_identifier": "id",
        "store": False,
        "truncation": "disabled",
    }
    answer = ask(server, **fields, reasoning={"effort": "low", "summary": "auto"}, tools=TOOLS, tool_choice="none")
    assert {name: answer[name] for name in fields} == fields
    assert answer["reasoning"] == {"effort": "low", "summary": "auto"}
    assert [tool["name"] for tool in answer["tools"]] == ["get_weather", "get_time"]
    assert [tool["strict"] for tool in answer["tools"]] == [True, False]
    assert answer["tools"][0]["parameters"] == TOOLS[0]["parameters"]
    assert (answer["tool_choice"], answer["status"], answer["model"]) == ("none", "incomplete", "org/small")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


def test_what_clients_send_without_a_wish_is_accepted(server: LiveServer) -> None:
    neutral = {
        "include": None,
        "tools": [],
        "truncation": "disabled",
        "reasoning": {"effort": None, "summary": None, "generate_summary": None},
        "store": False,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "background": False,
        "client_metadata": {"x-turn": "1"},
        "previous_response_id": None,
        "conversation": None,
        "prompt": None,
        "stream_options": None,
        "service_tier": "auto",
        "metadata": None,
        "top_logprobs": None,
        "tool_choice": "auto",
        "n": 1,
    }
    plain = ask(server)
    assert without_random_fields(ask(server, **neutral)) == without_random_fields(plain)
    names = ["reasoning.encrypted_content", "web_search_call.action.sources", "code_interpreter_call.outputs"]
    assert without_random_fields(ask(server, include=names)) == without_random_fields(plain)


def test_input_tokens_are_counted_as_the_answers_usage_counts_them(tool_live: LiveServer) -> None:
    tool_live.engine.script = say("Yes.")
    for fields in (
        {"input": "Warm there?"},
        {"input": [HELLO], "instructions": "Be short.", "tools": TOOLS, "tool_choice": "auto"},
        {"input": [HELLO], "tools": TOOLS, "tool_choice": "none"},
        {"input": [HELLO], "reasoning": {"effort": "low"}, "truncation": "auto", "text": {"verbosity": "low"}},
        {"input": [HELLO], "truncate_prompt_tokens": 5},
        {"input": [HELLO], "add_special_tokens": True},
    ):
        prompt = prompt_of(tool_live, ROUTE, **fields)
        counted = sync_client(tool_live).responses.input_tokens.count(model="default", extra_body=fields)
        assert counted.to_dict() == {"object": "response.input_tokens", "input_tokens": len(prompt)}, fields
    for fields, param in (
        ({"input": [HELLO], "personality": "friendly"}, "personality"),
        ({"input": "x" * 5_000_000}, "input"),
        ({"previous_response_id": "resp_1", "input": "a"}, "previous_response_id"),
        ({"input": [RESULT_ITEM]}, "input[0].call_id"),
    ):
        answer = tool_live.http.post("/v1/responses/input_tokens", json=fields)
        assert (answer.status_code, assert_openai_error(answer.content)["param"]) == (400, param)


def test_an_answer_says_what_was_done_of_fields_that_promise_nothing(server: LiveServer) -> None:
    plain = without_random_fields(ask(server))
    done = {"store": False, "truncation": "disabled", "service_tier": "default", "text": plain["text"]}
    assert {name: plain[name] for name in done} == done
    for fields in (
        {"store": True},
        {"truncation": "auto"},
        {"text": {"verbosity": "low"}},
        {"service_tier": "priority"},
        {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}},
        {"image": {"context_compression": "auto"}, "access_programs": {"cyber": "standard"}},
    ):
        assert without_random_fields(ask(server, **fields)) == plain, fields


SYSTEM = {"role": "system", "content": "Be short."}
HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "é"}'}}
CALL_ITEM = {"type": "function_call", "call_id": "call_1", "name": "get_time", "arguments": '{"zone": "é"}'}
SECOND_CALL = {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
SECOND_CALL_ITEM = {"type": "function_call", "call_id": "call_2", "name": "get_time", "arguments": "{}"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "noon"}
RESULT_ITEM = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}
SECOND_RESULT = {"role": "tool", "tool_call_id": "call_2", "content": "one"}
SECOND_RESULT_ITEM = {
    "type": "function_call_output",
    "call_id": "call_2",
    "output": [{"type": "input_text", "text": "one"}],
}


def text_item(text: str, kind: str = "output_text") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    if kind == "refusal":
        part = {"type": "refusal", "refusal": text}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


THOUGHT = {"type": "reasoning_text", "text": "Hm."}
REASONING_ITEM = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [THOUGHT]}
NO_JSON = RESULT | {"tool_call_id": "call_3", "content": "no JSON"}
ENCRYPTED_ITEM = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x", "content": None}
CUT_CALL = {"id": "call_3", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "'}}
CUT_CALL_ITEM = {"type": "function_call", "call_id": "call_3", "name": "get_time", "arguments": '{"zone": "'}
CUT_RESULT_ITEM = {"type": "function_call_output", "call_id": "call_3", "output": "no JSON"}
CONVERSATIONS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"input": "hello"}, [HELLO]),
    ({"input": [HELLO]}, [HELLO]),
    ({"input": [HELLO | {"type": "message", "id": "msg_9", "status": "completed"}]}, [HELLO]),
    (
        {
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}],
                }
            ]
        },
        [HELLO],
    ),
    ({"input": "hello", "instructions": "Be short."}, [SYSTEM, HELLO]),
    ({"input": [{"role": "developer", "content": "Be short."}, HELLO]}, [SYSTEM, HELLO]),
    (
        {"input": [SYSTEM, HELLO], "instructions": "Be kind."},
        [{"role": "system", "content": "Be kind.\n\nBe short."}, HELLO],
    ),
    (
        {"input": [HELLO, text_item("Hi."), HELLO, SYSTEM]},
        [HELLO, {"role": "assistant", "content": "Hi."}, HELLO, SYSTEM],
    ),
    ({"input": [HELLO, text_item("No.", "refusal"), HELLO]}, [HELLO, {"role": "assistant", "content": "No."}, HELLO]),
    (
        {"input": [HELLO, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, HELLO]},
        [HELLO, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, HELLO],
    ),
    (
        {"input": [HELLO, REASONING_ITEM, CALL_ITEM, RESULT_ITEM, ENCRYPTED_ITEM, HELLO]},
        [HELLO, {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "Hm."}, RESULT, HELLO],
    ),
    (
        {"input": [HELLO, REASONING_ITEM, text_item("Hi."), REASONING_ITEM, HELLO]},
        [
            *[HELLO, {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm."}],
            *[{"role": "assistant", "content": "", "reasoning_content": "Hm."}, HELLO],
        ],
    ),
    (
        {"input": [HELLO, CUT_CALL_ITEM, CUT_RESULT_ITEM]},
        [HELLO, {"role": "assistant", "tool_calls": [CUT_CALL]}, NO_JSON],
    ),
    ({"input": [HELLO, CALL_ITEM, RESULT_ITEM]}, [HELLO, {"role": "assistant", "tool_calls": [CALL]}, RESULT]),
    (  # as OpenAI's client dumps it
        {"input": [HELLO, CALL_ITEM | {"async_": None, "caller": None}, RESULT_ITEM]},
        [HELLO, {"role": "assistant", "tool_calls": [CALL]}, RESULT],
    ),
    (
        {"input": [HELLO, text_item("Let me see."), CALL_ITEM, SECOND_CALL_ITEM, RESULT_ITEM, SECOND_RESULT_ITEM]},
        [
            HELLO,
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, SECOND_CALL]},
            RESULT,
            SECOND_RESULT,
        ],
    ),
    (
        {"input": [HELLO, text_item("a"), CALL_ITEM, text_item("b"), RESULT_ITEM]},
        [HELLO, {"role": "assistant", "content": "ab", "tool_calls": [CALL]}, RESULT],
    ),
    (
        {"input": [HELLO, CALL_ITEM, RESULT_ITEM, SECOND_CALL_ITEM, SECOND_RESULT_ITEM, text_item("Noon."), HELLO]},
        [
            *[HELLO, {"role": "assistant", "tool_calls": [CALL]}, RESULT],
            *[{"role": "assistant", "tool_calls": [SECOND_CALL]}, SECOND_RESULT],
            *[{"role": "assistant", "content": "Noon."}, HELLO],
        ],
    ),
]


@pytest.mark.parametrize(("fields", "messages"), CONVERSATIONS)
def test_items_give_the_prompt_of_the_chat_with_the_same_messages(
    tool_live: LiveServer, fields: dict[str, Any], messages: list[Any]
) -> None:
    for extra, chat_extra in (({}, {}), ({"tools": TOOLS}, {"tools": CHAT_TOOLS})):
        expected = prompt_of(tool_live, "/v1/chat/completions", messages=messages, **chat_extra)
        assert prompt_of(tool_live, ROUTE, **fields, **extra) == expected


def test_fields_of_sampling_mean_what_they_mean_in_chat(server: LiveServer) -> None:
    fields = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 7, "stop": ["x"], "min_p": 0.1, "priority": 2}
    fields |= {
        "logit_bias": {"97": 1.5},
        "presence_penalty": 0.5,
        "cache_salt": "s",
        "ignore_eos": True,
        "top_logprobs": 2,
    }
    prompt_of(server, ROUTE, input="hello", max_output_tokens=4, **fields)
    prompt_of(server, "/v1/chat/completions", messages=[HELLO], max_completion_tokens=4, logprobs=True, **fields)
    found, expected = server.engine.requests
    for name in ("sampling", "seed", "stop_strings", "logit_bias", "cache_salt", "ignore_eos", "max_new_tokens"):
        assert getattr(found, name) == getattr(expected, name)
    assert (found.want_logprobs, found.num_top_logprobs, found.priority) == (True, 2, 2)


def test_logprobs_are_returned_if_included_or_asked_for(server: LiveServer) -> None:
    server.engine.script = say("Hello é there")
    assert ask(server)["output"][0]["content"][0]["logprobs"] == []
    for fields in ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 1}):
        answer = ask(server, **fields)
        (part,) = answer["output"][0]["content"]
        assert bytes(entry["bytes"][0] for entry in part["logprobs"]) == part["text"].encode()


def test_calls_are_items_and_are_sent_back_with_their_outputs(tool_live: LiveServer) -> None:
    calls = ("get_weather", {"city": "Köln", "days": 2}), ("get_time", {})
    tool_live.engine.script = say("Let me see.\n" + write_calls(tool_live, *calls))
    answer = ask(tool_live, tools=TOOLS)
    assert [item["type"] for item in answer["output"]] == ["message", "function_call", "function_call"]
    assert answer["output"][0]["content"][0]["text"] == "Let me see."
    assert [(item["name"], json.loads(item["arguments"])) for item in answer["output"][1:]] == list(calls)
    assert answer["status"] == "completed"
    client = sync_client(tool_live)
    parsed = client.responses.parse(model="default", input="Warm there?", tools=TOOLS[:1])
    (call,) = [item for item in parsed.output if item.type == "function_call"]
    assert call.parsed_arguments == {"city": "Köln", "days": 2}
    history: list[Any] = [{"role": "user", "content": "Warm there?"}, *parsed.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "20 °C"}
    tool_live.engine.script = say("Yes.")
    second = client.responses.create(model="default", input=[*history, result], tools=TOOLS)
    assert second.output_text == "Yes."
    prompt = tool_live.engine.requests[-1].prompt_ids.tolist()
    chat_call = {"id": "a", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    messages = [
        {"role": "user", "content": "Warm there?"},
        {"role": "assistant", "content": parsed.output_text, "tool_calls": [chat_call]},
        {"role": "tool", "tool_call_id": "a", "content": "20 °C"},
    ]
    assert prompt_of(tool_live, "/v1/chat/completions", messages=messages, tools=CHAT_TOOLS) == prompt


def test_tool_choice_and_parallel_calls_are_followed(tool_live: LiveServer, tokenizer_directory: Path) -> None:
    tool_live.engine.script = follow_grammars(tokenizer_directory)
    named = {"type": "function", "name": "get_weather"}
    fields: dict[str, Any] = {"tools": TOOLS, "seed": 4, "max_output_tokens": 600}
    answer = ask(tool_live, **fields, tool_choice=named)
    assert [item["name"] for item in answer["output"]] == ["get_weather"]
    assert GetWeather.model_validate_json(answer["output"][0]["arguments"])
    assert answer["tool_choice"] == named
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    answer = ask(tool_live, **fields, tool_choice=allowed, parallel_tool_calls=False)
    assert [item["name"] for item in answer["output"]] == ["get_time"]
    assert answer["tool_choice"] == allowed
    answer = ask(tool_live, **fields, tool_choice="required")
    assert {item["type"] for item in answer["output"]} == {"function_call"}


def test_a_cut_call_is_incomplete_and_can_be_streamed_by_openais_client(tool_live: LiveServer) -> None:
    text = write_calls(tool_live, ("get_weather", {"city": "Köln"}))
    tool_live.engine.script = say(text[: text.index("öln")], finish_reason="length")
    answer = ask(tool_live, tools=TOOLS)
    (call,) = answer["output"]
    assert (call["arguments"], call["status"], answer["status"]) == ('{"city": "K', "incomplete", "incomplete")
    events = sync_client(tool_live).responses.create(model="default", input="?", tools=TOOLS, stream=True)
    *_, last = events
    assert last.type == "response.incomplete"
    assert isinstance(last.response.output[0], ResponseFunctionToolCall)


class Answer(pydantic.BaseModel):
    is_warm: bool


def test_text_follows_its_format(server: LiveServer, tokenizer_directory: Path) -> None:
    server.engine.script = follow_grammars(tokenizer_directory)
    client = sync_client(server)
    fields: dict[str, Any] = {"model": "default", "input": "Warm?", "max_output_tokens": 200}
    parsed = client.responses.parse(**fields, text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)
    with client.responses.stream(**fields, text_format=Answer) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Answer)
    schema = {"type": "json_schema", "name": "a", "schema": Answer.model_json_schema(), "strict": False}
    answer = ask(server, text={"format": schema}, max_output_tokens=200, seed=3)
    assert Answer.model_validate_json(answer["output"][0]["content"][0]["text"])
    assert answer["text"]["format"] == schema
    answer = ask(server, text={"format": {"type": "json_object"}}, max_output_tokens=200, seed=3, temperature=0)
    assert answer["text"]["format"] == {"type": "json_object"}
    assert server.engine.requests[-1].grammar


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", 'default_options={"store": False}'),
    ({"conversation": "conv_1"}, "conversation", "send all items of the conversation"),
    ({"background": True}, "background", "not implemented"),
    ({"access_programs": {"cyber": "daybreak_blue"}}, "access_programs", "not implemented"),
    ({"prompt": {"id": "x"}}, "prompt", "not implemented"),
    ({"truncation": "left"}, "truncation", "auto"),
    ({"max_tokens": 3}, "max_tokens", "max_output_tokens"),
    ({"response_format": {"type": "text"}}, "response_format", "text.format"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search"),
    ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0]", "custom"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0]", "mcp"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "required"),
    ({"tools": [TOOLS[0] | {"async": True}]}, "tools[0].async", "not implemented"),
    ({"tools": [TOOLS[0] | {"async_": True}]}, "tools[0].async_", "not implemented"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice", "web_search_preview"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g'"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"include": ["all"]}, "include[0]", "must be"),
    ({"input": []}, "input", "must not be empty"),
    ({"input": 3}, "input", "a string or a list"),
    ({"input": ["a"]}, "input[0]", "an object"),
    (
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input[0]",
        "providerOptions: {openai: {store: false}}",
    ),
    ({"input": [{"id": "msg_1"}]}, "input[0]", "store=false"),
    ({"input": [HELLO, {"type": "web_search_call", "id": "ws_1"}]}, "input[1]", "web_search_call"),
    ({"input": [HELLO, {"type": "what"}]}, "input[1]", "unknown type 'what'"),
    ({"input": [HELLO | {"role": "tool"}]}, "input[0].role", "assistant"),
    ({"input": [{"role": "user"}]}, "input[0].content", "required"),
    ({"input": [HELLO | {"contents": "x"}]}, "input[0].contents", "unknown field"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
        "input_image",
    ),
    ({"input": [RESULT_ITEM]}, "input[0].call_id", "no earlier function call"),
    ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format", "as its name"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format", "json_schema"),
    ({"text": {"verbosity": "higher"}}, "text.verbosity", "medium"),
    ({"max_output_tokens": 100_000}, "max_output_tokens", "context_length_exceeded"),
    ({"input": "x" * 2000}, "input", "leaves no room"),
    ({"top_logprobs": 99}, "top_logprobs", "at most"),
    ({"n": 2}, "n", "1"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", ""),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "text"}}}},
        "text.format",
        "",
    ),
]


def test_a_format_too_deep_to_be_repeated_is_refused(shared_server: LiveServer) -> None:
    default: Any = 1
    for _ in range(300):
        default = [default]
    format_ = {"type": "json_schema", "name": "a", "schema": {"type": "object", "default": default}}
    answer = shared_server.http.post(ROUTE, json={"input": "hello", "text": {"format": format_}})
    error = assert_openai_error(answer.content)
    assert (answer.status_code, error["param"]) == (400, "text.format"), error
    assert "nested too deeply" in error["message"]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_refusals_name_the_field_of_this_route(
    shared_server: LiveServer, fields: dict[str, Any], param: str, words: str
) -> None:
    body = {"model": "default", "input": "hello"} | fields
    answer = shared_server.http.post(ROUTE, json=body)
    error = assert_openai_error(answer.content)
    assert (answer.status_code, error["param"]) == (400, param), error
    assert param in error["message"]
    assert words in error["message"]
    streamed = shared_server.http.post(ROUTE, json=body | {"stream": True})
    assert (streamed.status_code, streamed.content) == (400, answer.content)


def test_an_unknown_model_is_a_404_with_its_own_code(shared_server: LiveServer) -> None:
    answer = shared_server.http.post(ROUTE, json={"model": "other", "input": "hello"})
    assert (answer.status_code, assert_openai_error(answer.content)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]
)
def test_nothing_is_stored_and_errors_say_so(shared_server: LiveServer, method: str, path: str) -> None:
    answer = shared_server.http.request(method, f"{ROUTE}/resp_1{path}")
    error = assert_openai_error(answer.content)
    assert (answer.status_code, error["code"], error["param"]) == (404, "response_not_found", "response_id")
    assert "stores no responses" in error["message"]
    client = sync_client(shared_server)
    with pytest.raises(openai.NotFoundError, match="stores no responses"):
        client.responses.retrieve("resp_1")


def fail_after(num_tokens: int) -> Any:
    def script(_request: GenerateRequest, _index: int) -> Reply:
        return Reply([97] * num_tokens, None, "stop", error="NaN for this request", error_code="numerical_error")

    return script


def test_a_stream_that_fails_ends_with_the_error_and_the_failed_response(server: LiveServer) -> None:
    server.engine.script, server.engine.pause_s = fail_after(5), 0.02
    body = {"model": "default", "input": "hello"}
    whole = server.http.post(ROUTE, json=body)
    assert (whole.status_code, assert_openai_error(whole.content)["code"]) == (500, "numerical_error")
    events = checked_events(server.http.post(ROUTE, json=body | {"stream": True}).content)
    error, failed = events[-2:]
    assert (error["type"], error["code"], error["message"]) == ("error", "numerical_error", "NaN for this request")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "NaN for this request"}
    assert failed["response"]["id"] == events[0]["response"]["id"]


def test_a_stop_string_and_an_empty_answer_have_one_message(server: LiveServer) -> None:
    server.engine.script = say("ab stop cd")
    answer = ask(server, stop="stop")
    assert (answer["output"][0]["content"][0]["text"], answer["status"]) == ("ab ", "completed")
    server.engine.script = lambda _request, _index: Reply([IM_END])
    answer = ask(server)
    assert [item["content"][0]["text"] for item in answer["output"]] == [""]


def test_lines_of_bulk_requests_and_batches_have_the_live_answers(served_model: ServedModel, tmp_path: Path) -> None:
    body = {"model": "default", "input": "hello world", "instructions": "Be short.", "seed": 1}
    with live_server(served_model, FakeEngine(), data_dir=tmp_path) as server:
        live = checked_response(server.http.post(ROUTE, json=body).content)
        line = {"custom_id": "a", "url": ROUTE, "body": body}
        result = orjson.loads(server.http.post("/v1/bulk", content=orjson.dumps(line)).content)
        assert without_random_fields(result["response"]["body"]) == without_random_fields(live)
        client = sync_client(server)
        content = orjson.dumps(line | {"method": "POST"}) + b"\n"
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
        deadline = time.monotonic() + 60
        while batch.status != "completed":
            assert time.monotonic() < deadline, batch
            time.sleep(0.02)
            batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        result = orjson.loads(client.files.content(batch.output_file_id).content)
        assert without_random_fields(result["response"]["body"]) == without_random_fields(live)
        assert batch.usage is not None
        assert batch.usage.input_tokens == live["usage"]["input_tokens"]
        assert batch.usage.output_tokens == live["usage"]["output_tokens"]
        streamed = {"custom_id": "b", "url": ROUTE, "body": body | {"stream": True}}
        refused = orjson.loads(server.http.post("/v1/bulk", content=orjson.dumps(streamed)).content)
        assert refused["error"]["param"] == "stream"


# Fields of chat that have another name here, or no place in the answer.
ELSEWHERE = {"n", "best_of", "max_tokens", "response_format", "return_token_ids", "prompt_logprobs", "echo"}
ELSEWHERE |= {"return_routed_experts", "routed_experts_prompt_start"}
SHARED = {name: field for name, field in KNOWN_FIELDS.items() if "chat" in field.endpoints and name not in ELSEWHERE}


def test_fields_of_other_servers_are_those_of_chat(shared_server: LiveServer) -> None:
    for name, field in SHARED.items():
        for value in (*field.neutral, *field.examples):
            answer = shared_server.http.post(ROUTE, json=minimal_body(ROUTE) | {name: value})
            assert answer.status_code == 200, (name, value, answer.text)
        if field.is_neutral_only:
            answer = shared_server.http.post(ROUTE, json=minimal_body(ROUTE) | {name: "no value of any field"})
            assert (answer.status_code, assert_openai_error(answer.content)["param"]) == (400, name)
