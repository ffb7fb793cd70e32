"""/v1/messages and its count of tokens, in the form of Anthropic's clients, compared with chat."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from tests.helpers.small_tokenizer import IM_END
from tests.server.helpers.fake_engine import FakeEngine, Reply
from tests.server.helpers.grammar_script import follow_grammars
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.message_events import checked_message, joined_message, without_ids
from tests.server.helpers.tool_answers import TOOLS as CHAT_TOOLS
from tests.server.helpers.tool_answers import GetWeather, say, tool_server, write_calls
from tests.server.jobs.helpers.uploads import upload
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.dialects.client_tools import CLIENT_TOOLS
from tokasaurus.server.protocol.known_fields import KNOWN_FIELDS
from tokasaurus.server.served_model import ServedModel

ROUTE, COUNT = "/v1/messages", "/v1/messages/count_tokens"
WEATHER = openai.pydantic_function_tool(GetWeather, name="get_weather")["function"]
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": WEATHER["description"],
        "input_schema": WEATHER["parameters"],
        "strict": True,
    },
    {"name": "get_time", "description": "The time.", "input_schema": {"type": "object", "properties": {}}},
]
QUESTION: list[Any] = [{"role": "user", "content": "Warm there?"}]


@pytest.fixture(scope="module")
def tool_live(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with tool_server("hermes", served_model, tmp_path_factory.mktemp("tokenizer")) as live:
        yield live


def ask(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """The whole answer, after asserting that streams with small and large deltas add up to it."""
    body = {"model": "default", "messages": QUESTION, "max_tokens": 100} | fields
    answer = server.http.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    whole = checked_message(answer.content)
    for delta_size in (1, 7, 10_000):
        server.engine.delta_size = delta_size
        streamed = server.http.post(ROUTE, json=body | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert without_ids(joined_message(streamed.content)) == without_ids(whole)
    return whole


def prompt_of(server: LiveServer, route: str, **fields: Any) -> list[int]:
    answer = server.http.post(route, json={"model": "default"} | fields)
    assert answer.status_code == 200, answer.text
    return server.engine.requests[-1].prompt_ids.tolist()


def anthropic_error(answer: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(answer.content)
    assert body.keys() == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    error: dict[str, Any] = body["error"]
    return error


def test_text_and_stop_reasons(server: LiveServer) -> None:
    server.engine.script = say("Hello é there")
    message = ask(server)
    assert message["content"] == [{"type": "text", "text": "Hello é there", "citations": None}]
    assert (message["stop_reason"], message["stop_sequence"], message["model"]) == ("end_turn", None, "org/small")
    message = ask(server, stop_sequences=["zzz", "é th"])
    assert message["content"][0]["text"] == "Hello "
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "é th")
    server.engine.script = say("Hello", finish_reason="length")
    assert ask(server)["stop_reason"] == "max_tokens"
    # Agents ask for more than a small model's context has.
    assert ask(server, max_tokens=100_000)["stop_reason"] == "model_context_window_exceeded"
    request = server.engine.requests[-1]
    assert request.max_new_tokens == 512 - len(request.prompt_ids)
    server.engine.script = lambda _request, _index: Reply([IM_END])
    assert [block["text"] for block in ask(server)["content"]] == [""]


CALL = {"id": "toolu_1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "é"}'}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {"zone": "é"}, "caller": {"type": "direct"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon", "is_error": False}
HELLO = {"role": "user", "content": "hello"}


def text(value: str, **extra: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **extra}


DOCUMENT = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "Whales eat krill."},
    "title": "Whales",
    "context": "From a book.",
    "citations": {"enabled": False},
    "cache_control": {"type": "ephemeral"},
}
FOUND = {"type": "search_result", "source": "http://a.example", "title": "Seals", "content": [text("Fi"), text("sh.")]}
SHOWN_DOCUMENT = "<document>\ntitle: Whales\ncontext: From a book.\n\nWhales eat krill.\n</document>"
SHOWN_RESULT = "<search_result>\nsource: http://a.example\ntitle: Seals\n\nFish.\n</search_result>"
PLAIN_DOCUMENT = {"type": "document", "source": {"type": "content", "content": [text("Kr"), text("ill")]}}

CONVERSATIONS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"messages": [HELLO]}, [HELLO]),
    ({"messages": [{"role": "user", "content": [text("hel"), text("lo", cache_control=None)]}]}, [HELLO]),
    ({"messages": [HELLO], "system": "Be short."}, [{"role": "system", "content": "Be short."}, HELLO]),
    (
        {"messages": [HELLO], "system": [text("a", cache_control={"type": "ephemeral"}), text("b")]},
        [{"role": "system", "content": "a\n\nb"}, HELLO],
    ),
    (
        {"messages": [HELLO, {"role": "assistant", "content": [text("Hi.")]}, HELLO]},
        [HELLO, {"role": "assistant", "content": "Hi."}, HELLO],
    ),
    (
        {
            "messages": [
                HELLO,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        text("Let me see."),
                        USE,
                    ],
                },
                {"role": "user", "content": [RESULT, text("hello")]},
            ]
        },
        [
            HELLO,
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL], "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "noon"},
            HELLO,
        ],
    ),
    (
        {"messages": [{"role": "user", "content": [text("Read: "), DOCUMENT, FOUND, text("hel"), text("lo")]}]},
        [{"role": "user", "content": f"Read: \n\n{SHOWN_DOCUMENT}\n\n{SHOWN_RESULT}\n\nhello"}],
    ),
    (
        {"messages": [{"role": "user", "content": [PLAIN_DOCUMENT]}]},
        [{"role": "user", "content": "<document>\nKrill\n</document>"}],
    ),
    (
        {
            "messages": [
                HELLO,
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [RESULT | {"content": [FOUND, text("more")]}, PLAIN_DOCUMENT]},
            ]
        },
        [
            HELLO,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": f"{SHOWN_RESULT}\n\nmore"},
            {"role": "user", "content": "<document>\nKrill\n</document>"},
        ],
    ),
    (
        {
            "messages": [
                HELLO,
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [RESULT | {"content": [text("no"), text("on")]}]},
            ]
        },
        [
            HELLO,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "noon"},
        ],
    ),
]


@pytest.mark.parametrize(("fields", "messages"), CONVERSATIONS)
def test_blocks_give_the_prompt_of_the_chat_with_the_same_messages_and_its_count(
    tool_live: LiveServer, fields: dict[str, Any], messages: list[Any]
) -> None:
    tool_live.engine.script = say("Yes.")
    plain_tools = [CHAT_TOOLS[0], {"type": "function", "function": CHAT_TOOLS[1]["function"]}]
    for extra, chat_extra in (({}, {}), ({"tools": TOOLS}, {"tools": plain_tools})):
        expected = prompt_of(tool_live, "/v1/chat/completions", messages=messages, **chat_extra)
        assert prompt_of(tool_live, ROUTE, max_tokens=5, **fields, **extra) == expected
        counted = tool_live.http.post(COUNT, json={"model": "default", **fields, **extra})
        assert counted.json() == {"input_tokens": len(expected)}


def test_calls_are_blocks_and_are_sent_back_with_their_results(tool_live: LiveServer) -> None:
    calls = ("get_weather", {"city": "Köln", "days": 2}), ("get_time", {})
    tool_live.engine.script = say("Let me see.\n" + write_calls(tool_live, *calls))
    message = ask(tool_live, tools=TOOLS)
    assert [block["type"] for block in message["content"]] == ["text", "tool_use", "tool_use"]
    assert [(block["name"], block["input"]) for block in message["content"][1:]] == list(calls)
    assert message["stop_reason"] == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "20 °C"} for block in message["content"][1:]
    ]
    history = [*QUESTION, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": results}]
    tool_live.engine.script = say("Yes.")
    assert ask(tool_live, messages=history, tools=TOOLS)["content"][0]["text"] == "Yes."
    cut = write_calls(tool_live, calls[0])
    tool_live.engine.script = say(cut[: cut.index("2")], finish_reason="length")
    message = ask(tool_live, tools=TOOLS)
    assert (message["content"][0]["input"], message["stop_reason"]) == ({"city": "Köln"}, "max_tokens")


@pytest.mark.parametrize("kind", CLIENT_TOOLS)
def test_a_tool_that_a_type_defines_is_shown_and_called_like_any_other(
    tool_live: LiveServer, tokenizer_directory: Path, kind: str
) -> None:
    defined = CLIENT_TOOLS[kind]
    asked = {"type": kind, "name": defined.name, "cache_control": None}
    plain = {"name": defined.name, "description": defined.description, "input_schema": defined.parameters}
    tool_live.engine.script = say("Yes.")
    shown = prompt_of(tool_live, ROUTE, messages=QUESTION, max_tokens=5, tools=[asked])
    assert shown == prompt_of(tool_live, ROUTE, messages=QUESTION, max_tokens=5, tools=[plain])
    counted = tool_live.http.post(COUNT, json={"messages": QUESTION, "tools": [asked]})
    assert counted.json() == {"input_tokens": len(shown)}
    tool_live.engine.script = follow_grammars(tokenizer_directory)
    choice = {"type": "tool", "name": defined.name}
    (block,) = ask(tool_live, tools=[asked], tool_choice=choice, seed=4, max_tokens=400)["content"]
    assert (block["type"], block["name"]) == ("tool_use", defined.name)
    commands = defined.parameters["properties"]["command"].get("enum")
    assert commands is None or block["input"]["command"] in commands


def test_a_thread_is_refused_so_that_the_client_goes_on_without(server: LiveServer) -> None:
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    body = {"model": "default", "messages": QUESTION, "max_tokens": 5}
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        for stream in (False, True):
            answer = server.http.post(f"{ROUTE}?beta=true", json=body | {"thread": thread, "stream": stream})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["details"]) == (400, "invalid_request_error", details)
            assert "thread" in error["message"]
    assert server.http.post(f"{ROUTE}?beta=true", json=body | {"thread": None}).status_code == 200


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("route", [ROUTE, COUNT])
def test_values_nested_very_deeply_are_refused_by_name(shared_server: LiveServer, route: str) -> None:
    used = [HELLO, {"role": "assistant", "content": [USE | {"input": nested(300)}]}]
    tool = {"name": "f", "input_schema": {"type": "object", "default": nested(300)}}
    for fields, field in (({"messages": used}, ".input"), ({"messages": [HELLO], "tools": [tool]}, ".input_schema")):
        answer = shared_server.http.post(route, json=fields if route == COUNT else fields | {"max_tokens": 5})
        assert answer.status_code == 400, answer.text
        assert f"{field} is nested too deeply" in anthropic_error(answer)["message"]


def test_blocks_nested_very_deeply_are_refused(shared_server: LiveServer) -> None:
    for kind, inner in (("tool_result", "content"), ("document", "source")):
        block: Any = []
        for _ in range(300):
            block = [{"type": kind, "tool_use_id": "1", inner: block}]
        answer = shared_server.http.post(
            ROUTE, json={"messages": [{"role": "user", "content": block}], "max_tokens": 5}
        )
        assert (answer.status_code, anthropic_error(answer)["type"]) == (400, "invalid_request_error")


def test_tool_choice_is_followed(tool_live: LiveServer, tokenizer_directory: Path) -> None:
    tool_live.engine.script = follow_grammars(tokenizer_directory)
    fields: dict[str, Any] = {"tools": TOOLS, "seed": 4, "max_tokens": 600}
    message = ask(tool_live, **fields, tool_choice={"type": "tool", "name": "get_weather"})
    (block,) = message["content"]
    assert GetWeather.model_validate(block["input"])
    assert message["stop_reason"] == "tool_use"
    choice = {"type": "any", "disable_parallel_tool_use": True}
    assert len(ask(tool_live, **fields, tool_choice=choice)["content"]) == 1
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    output: dict[str, Any] = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    message = ask(tool_live, output_config=output, seed=4)
    assert isinstance(json.loads(message["content"][0]["text"])["a"], bool)


def test_what_clients_send_without_a_wish_is_accepted(server: LiveServer) -> None:
    plain = ask(server)
    neutral = {
        "metadata": {"user_id": "me"},
        "service_tier": "standard_only",
        "inference_geo": "eu",
        "speed": "fast",
        "fallbacks": [{"model": "other"}],
        "billing_policy": {"type": "billing_policy", "bill_to": "self"},
        "thinking": {"type": "adaptive"},
        "cache_control": {"type": "ephemeral"},
        "stop_sequences": [],
        "tools": [],
        "top_k": None,
        "temperature": 1.0,
        "tool_choice": {"type": "auto"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    assert without_ids(ask(server, **neutral)) == without_ids(plain)
    done = {"service_tier": "standard", "speed": "standard", "inference_geo": "not_available"}
    assert plain["usage"].items() >= done.items()
    assert without_ids(ask(server, thinking={"type": "enabled", "budget_tokens": 1024})) == without_ids(plain)


def test_fields_of_sampling_mean_what_they_mean_in_chat(server: LiveServer) -> None:
    fields = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 7, "min_p": 0.1}
    prompt_of(server, ROUTE, messages=[HELLO], max_tokens=4, stop_sequences=["x"], **fields)
    prompt_of(server, "/v1/chat/completions", messages=[HELLO], max_tokens=4, stop="x", **fields)
    found, expected = server.engine.requests
    for name in ("sampling", "seed", "stop_strings", "max_new_tokens"):
        assert getattr(found, name) == getattr(expected, name)


# Fields of chat that have another name or form here, or no place in the answer.
ELSEWHERE = {"n", "best_of", "max_tokens", "response_format", "return_token_ids", "prompt_logprobs", "metadata"}
ELSEWHERE |= {"stop", "echo", "return_routed_experts", "routed_experts_prompt_start"}


def test_fields_of_other_servers_are_those_of_chat(shared_server: LiveServer) -> None:
    body = {"messages": [HELLO], "max_tokens": 2}
    for name, field in KNOWN_FIELDS.items():
        if "chat" in field.endpoints and name not in ELSEWHERE:
            for value in (*field.neutral, *field.examples):
                answer = shared_server.http.post(ROUTE, json=body | {name: value})
                assert answer.status_code == 200, (name, value, answer.text)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    *(
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": source}]}]}, words)
        for source, words in (
            ({}, "messages[0].content[0].source must be an object"),
            ({"type": "base64", "media_type": "application/pdf", "data": ""}, "source is of type 'base64'"),
            ({"type": "url", "url": "http://192.0.2.1/a.pdf"}, "source is of type 'url'"),
            ({"type": "file", "file_id": "file_1"}, "source is of type 'file'"),
            ({"type": "content", "content": [{"type": "image", "source": {}}]}, "'image'"),
            ({"type": "content", "content": [{"type": "document", "source": {}}]}, "'document'"),
            ({"type": "text", "data": "a", "media_type": "text/html"}, "text/plain"),
        )
    ),
    ({"messages": [{"role": "user", "content": [DOCUMENT | {"citations": {"enabled": True}}]}]}, "citations"),
    ({"messages": [{"role": "user", "content": [FOUND | {"content": [{"type": "image"}]}]}]}, "'image'"),
    ({"messages": [{"role": "assistant", "content": [DOCUMENT]}]}, "does not go with the role assistant"),
    (
        {"messages": [HELLO], "system": [DOCUMENT]},
        "here: only blocks of type text are",
    ),
    ({"fallbacks": "x"}, 'fallbacks must be "default" or a list'),
    ({"tools": [{"type": "bash_20250124", "name": "sh"}]}, "must be 'bash'"),
    ({"tools": [{"type": "bash_20250124"}]}, "tools[0].name is required"),
    ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "computer_20250124"),
    ({"tools": [{"type": "code_execution_20250825", "name": "code_execution"}]}, "code_execution_20250825"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "does not go with the role user"),
    ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "does not go with the role assistant"),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "toolu_1"),
    ({"messages": [HELLO | {"rôle": "x"}]}, "unknown field"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"stop": ["x"]}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x" * 100_000]}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "'g'"),
    ({"container": "x"}, "container"),
    ({"fallback_credit_token": "x"}, "fallback_credit_token"),
    ({"billing_policy": {"type": "billing_policy", "bill_to": "user_profile"}}, "billing_policy"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses_20250919"),
    ({"context_management": {"edits": [{}]}}, "context_management must have edits"),
    ({"context_management": {"edits": {}}}, "context_management must be an object"),
    ({"context_management": "x"}, "context_management must be an object"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, "context_length_exceeded"),
    ({"temprature": 1}, "temperature"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_refusals_are_in_anthropics_form(shared_server: LiveServer, fields: dict[str, Any], words: str) -> None:
    body = {"model": "default", "messages": [HELLO], "max_tokens": 5} | fields
    answer = shared_server.http.post(ROUTE, json=body)
    error = anthropic_error(answer)
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]
    streamed = shared_server.http.post(ROUTE, json=body | {"stream": True})
    assert (streamed.status_code, streamed.content) == (400, answer.content)


def test_every_layer_answers_errors_in_anthropics_form(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine(), api_key="secret", allowed_hosts="toka.example") as server:
        body = {"model": "default", "messages": [HELLO], "max_tokens": 5}
        for path in (ROUTE, COUNT):
            with httpx.Client(base_url=server.url) as http:
                answer = http.post(path, json=body)
                assert (answer.status_code, anthropic_error(answer)["type"]) == (401, "authentication_error")
                answer = http.post(path, json=body, headers={"Host": "rebound.example"})
                assert (answer.status_code, anthropic_error(answer)["type"]) == (421, "invalid_request_error")
                if path == ROUTE:
                    with_key = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
                    assert checked_message(http.post(path, json=body, headers=with_key).content)
            answer = server.http.post(path, json=body | {"model": "other"})
            assert (answer.status_code, anthropic_error(answer)["type"]) == (404, "not_found_error")
            answer = server.http.get(path)
            assert (answer.status_code, anthropic_error(answer)["type"]) == (405, "invalid_request_error")
            answer = server.http.post(path, content=b"{")
            assert (answer.status_code, anthropic_error(answer)["type"]) == (400, "invalid_request_error")
            assert int(answer.headers["content-length"]) == len(answer.content)
        answer = server.http.post("/v1/messages/batches", json={})
        assert answer.status_code == 404
        assert "/v1/bulk" in anthropic_error(answer)["message"]
        assert server.http.get("/v1/nowhere").json()["error"]["type"] == "invalid_request_error"


def test_a_stream_that_fails_ends_with_anthropics_error(server: LiveServer) -> None:
    def fail(_request: GenerateRequest, _index: int) -> Reply:
        return Reply([97] * 5, None, "stop", error="NaN for this request", error_code="numerical_error")

    server.engine.script, server.engine.pause_s = fail, 0.02
    body = {"model": "default", "messages": [HELLO], "max_tokens": 9}
    answer = server.http.post(ROUTE, json=body)
    assert (answer.status_code, anthropic_error(answer)["type"]) == (500, "api_error")
    *_, last = server.http.post(ROUTE, json=body | {"stream": True}).content.strip().split(b"\n\n")
    head, data = last.split(b"\n")
    assert head == b"event: error"
    expected = {"type": "error", "error": {"type": "api_error", "message": "NaN for this request"}}
    assert orjson.loads(data.removeprefix(b"data: ")) == expected


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS[1:], "system": "Be short."}])
def test_lines_of_bulk_requests_and_batches_have_the_live_answers(
    served_model: ServedModel, tmp_path: Path, fields: dict[str, Any]
) -> None:
    body = {"model": "default", "messages": [HELLO], "max_tokens": 9, "seed": 1, **fields}
    bad = body | {"max_tokens": 0}
    with live_server(served_model, FakeEngine(), data_dir=tmp_path) as server:
        live = checked_message(server.http.post(ROUTE, json=body).content)
        pairs = [("a", body), ("b", bad), ("c", body | {"stream": True})]
        lines = [{"custom_id": id_, "method": "POST", "url": ROUTE, "body": one} for id_, one in pairs]
        content = b"\n".join(map(orjson.dumps, lines))
        bulk = [orjson.loads(line) for line in server.http.post("/v1/bulk", content=content).content.splitlines()]
        file = upload(server, content)
        created = {"input_file_id": file["id"], "endpoint": ROUTE, "completion_window": "24h"}
        batch = server.http.post("/v1/batches", json=created).json()
        deadline = time.monotonic() + 60
        while batch["status"] != "completed":
            assert time.monotonic() < deadline, batch
            time.sleep(0.02)
            batch = server.http.get(f"/v1/batches/{batch['id']}").json()
        written = [server.http.get(f"/v1/files/{batch[f'{kind}_file_id']}/content") for kind in ("output", "error")]
        stored = [orjson.loads(line) for file in written for line in file.content.splitlines()]
        for results in (bulk, stored):
            by_id = {result["custom_id"]: result for result in results}
            assert by_id["a"]["response"]["status_code"] == 200
            assert without_ids(by_id["a"]["response"]["body"]) == without_ids(live)
            assert by_id["b"]["response"]["body"]["error"]["param"] == "max_tokens"
            assert "stream" in orjson.dumps(by_id["c"]).decode()
            assert len(by_id) == 3
        used = live["usage"]
        assert batch["usage"]["output_tokens"] == used["output_tokens"]
        assert batch["usage"]["input_tokens"] == used["input_tokens"] + used["cache_read_input_tokens"]


def test_a_count_beyond_the_servers_limit_is_refused(shared_server: LiveServer) -> None:
    long = {"model": "default", "messages": [{"role": "user", "content": "x" * 2000}]}
    assert shared_server.http.post(COUNT, json=long).json()["input_tokens"] > 2000
    answer = shared_server.http.post(COUNT, json={"messages": [{"role": "user", "content": "x" * 5_000_000}]})
    assert answer.status_code == 400
    assert "at most 1048576 characters" in anthropic_error(answer)["message"]
