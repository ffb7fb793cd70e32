"""Reasoning over HTTP: fields of answers, streams, bulk requests and batches; fields that ask for it."""

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.helpers.small_model import make_served_model
from tests.helpers.small_tokenizer import IM_END
from tests.server.helpers.bodies_and_errors import CHAT
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.grammar_script import follow_grammars
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.message_events import checked_message, joined_message, without_ids
from tests.server.helpers.openai_client import sync_client
from tests.server.helpers.reasoning_templates import EFFORT_TEMPLATE, QWEN3_TEMPLATE, R1_TEMPLATE
from tests.server.helpers.response_events import (
    checked_events,
    checked_response,
    joined_response,
    without_random_fields,
)
from tests.server.helpers.tool_answers import LIMITS, TOOLS, say
from tests.server.helpers.tool_templates import HERMES_TEMPLATE, save_tokenizer_with
from tests.server.jobs.helpers.uploads import upload
from tokasaurus.server.tools.formats import HERMES
from tokasaurus.server.tools.support import find_tool_support

QUESTION: list[Any] = [{"role": "user", "content": "Warm there?"}]
THOUGHT = "<think>\nIs it?\n</think>\n\nYes."


@contextmanager
def server_with(template: str, directory: Path, data_dir: Path | None = None) -> Iterator[LiveServer]:
    model = make_served_model(save_tokenizer_with(template, directory))
    support = find_tool_support(model.tokenizer, None)
    model = dataclasses.replace(model, find_tools=lambda: support)
    with live_server(model, FakeEngine(limits=LIMITS), data_dir=data_dir) as server:
        yield server


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with server_with(QWEN3_TEMPLATE, tmp_path_factory.mktemp("qwen"), tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(scope="module")
def r1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with server_with(R1_TEMPLATE, tmp_path_factory.mktemp("r1")) as server:
        yield server


def ask(server: LiveServer, **fields: Any) -> dict[str, Any]:
    answer = server.http.post(CHAT, json={"model": "default", "messages": QUESTION} | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def message_of(answer: dict[str, Any], index: int = 0) -> dict[str, Any]:
    message: dict[str, Any] = answer["choices"][index]["message"]
    return message


def split(server: LiveServer, **fields: Any) -> tuple[str | None, str | None]:
    """(reasoning, content) of the answer."""
    message = message_of(ask(server, **fields))
    assert message["reasoning"] == message["reasoning_content"]
    return message["reasoning"], message["content"]


def prompt_of(server: LiveServer) -> str:
    ids = server.engine.requests[-1].prompt_ids.tolist()
    answer = server.http.post("/detokenize", json={"tokens": ids}).json()
    prompt: str = answer["prompt"]
    return prompt


def test_reasoning_is_apart_from_content_whole_and_streamed(qwen: LiveServer) -> None:
    qwen.engine.script = say(THOUGHT, "Yes.", "<think>cut", "<think>\n\n</think>\n\nNo")
    answer = ask(qwen, n=4)
    expected = [("Is it?", "Yes."), (None, "Yes."), ("cut", None), (None, "No")]
    assert [(m["reasoning_content"], m["content"]) for m in map(message_of, [answer] * 4, range(4))] == expected
    num_reasoning = len("<think>\nIs it?\n</think>") + len("<think>cut") + len("<think>\n\n</think>")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
    client = sync_client(qwen)
    for delta_size in (1, 3, 1000):
        qwen.engine.delta_size = delta_size
        stream = client.chat.completions.create(
            model="default", messages=QUESTION, n=4, stream=True, stream_options={"include_usage": True}
        )
        found: list[list[str | None]] = [[None, None] for _ in range(4)]
        usage = None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                extra = choice.delta.model_extra or {}
                assert extra.get("reasoning") == extra.get("reasoning_content")
                for place, text in enumerate((extra.get("reasoning_content"), choice.delta.content)):
                    if text is not None:
                        found[choice.index][place] = (found[choice.index][place] or "") + text
        assert [tuple(one) for one in found] == expected
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == num_reasoning


CALL = HERMES.write("get_time", {})


@pytest.mark.parametrize(
    ("text", "finish_reason", "fields"),
    [
        (THOUGHT, "stop", {}),
        (f"<think>\nPerhaps {CALL}\n</think>\n\nNow\n{CALL}", "stop", {}),
        ("<think>\nIs it", "length", {}),
        ("Yes.", "stop", {"enable_thinking": False}),
        (THOUGHT, "stop", {"separate_reasoning": False}),
    ],
)
@pytest.mark.parametrize("delta_size", [1, 3, 7, 1000])
def test_streams_of_responses_and_messages_equal_whole_answers_and_chats(
    qwen: LiveServer, text: str, finish_reason: Any, fields: dict[str, Any], delta_size: int
) -> None:
    qwen.engine.script, qwen.engine.delta_size = say(text, finish_reason=finish_reason), delta_size
    function = TOOLS[1]["function"]
    chat = ask(qwen, tools=TOOLS[1:], **fields)
    expected = message_of(chat)
    num_reasoning = chat["usage"]["completion_tokens_details"]["reasoning_tokens"]

    body = {"input": "Warm there?", "tools": [{"type": "function", **function}]} | fields
    whole = checked_response(qwen.http.post("/v1/responses", json=body).content)
    joined = joined_response(checked_events(qwen.http.post("/v1/responses", json=body | {"stream": True}).content))
    assert without_random_fields(joined) == without_random_fields(whole)
    texts = dict.fromkeys(("reasoning", "message", "function_call"), "")
    for item in whole["output"]:
        texts[item["type"]] += item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    calls = [call["function"]["arguments"] for call in expected.get("tool_calls", [])]
    assert texts["reasoning"] == (expected["reasoning"] or "")
    assert texts["message"] == (expected["content"] or "")
    assert texts["function_call"] == "".join(calls)
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": num_reasoning}

    tool = {"name": function["name"], "input_schema": {"type": "object"}}
    body = {"messages": QUESTION, "max_tokens": 1000, "tools": [tool]} | fields
    message = checked_message(qwen.http.post("/v1/messages", json=body).content)
    streamed = joined_message(qwen.http.post("/v1/messages", json=body | {"stream": True}).content)
    assert without_ids(streamed) == without_ids(message)
    shown = {name: "".join(block.get(name, "") for block in message["content"]) for name in ("thinking", "text")}
    assert shown == {"thinking": expected["reasoning"] or "", "text": expected["content"] or ""}
    assert [block["input"] for block in message["content"] if block["type"] == "tool_use"] == list(
        map(json.loads, calls)
    )
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": num_reasoning}


def test_a_prompt_that_begins_reasoning_is_continued_by_it(r1: LiveServer) -> None:
    r1.engine.script = say("Is it?\n</think>\n\nYes.", finish_reason="stop")
    assert split(r1) == ("Is it?", "Yes.")
    r1.engine.script = say("Is it", finish_reason="length")
    answer = ask(r1)
    assert (message_of(answer)["reasoning"], message_of(answer)["content"]) == ("Is it", None)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Is it")}


def test_reasoning_may_be_hidden_or_left_in_the_content(qwen: LiveServer) -> None:
    qwen.engine.script = say(THOUGHT)
    count = {"reasoning_tokens": len("<think>\nIs it?\n</think>")}
    for fields, expected in (
        ({"include_reasoning": False}, (None, "Yes.")),
        ({"separate_reasoning": False}, (None, THOUGHT)),
        ({"include_reasoning": None, "separate_reasoning": None}, ("Is it?", "Yes.")),
    ):
        assert split(qwen, **fields) == expected
        assert ask(qwen, **fields)["usage"]["completion_tokens_details"] == count


def test_an_answer_of_hidden_reasoning_alone_has_no_content(qwen: LiveServer) -> None:
    """As with reasoning that is shown: null in chats, also streamed, and no output item or block elsewhere."""
    qwen.engine.script = say("<think>\nIs it", finish_reason="length")
    for included in (True, False):
        assert split(qwen, include_reasoning=included) == ("Is it" if included else None, None)
        body = {"messages": QUESTION, "stream": True, "include_reasoning": included}
        lines = qwen.http.post(CHAT, json=body).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert not any(choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"])
        body = {"input": "Warm there?", "include_reasoning": included}
        answer = qwen.http.post("/v1/responses", json=body).json()
        assert [item["type"] for item in answer["output"]] == ["reasoning"] * included
        assert (answer["status"], answer["usage"]["output_tokens"]) == ("incomplete", len("<think>\nIs it"))
        body = {"messages": QUESTION, "max_tokens": 99, "include_reasoning": included}
        answer = qwen.http.post("/v1/messages", json=body).json()
        assert [block["type"] for block in answer["content"]] == ["thinking"] * included


def test_a_model_without_reasoning_in_its_template_keeps_its_text(tmp_path: Path) -> None:
    with server_with(HERMES_TEMPLATE, tmp_path) as server:
        server.engine.script = say(THOUGHT)
        for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max", None):
            answer = ask(server, reasoning_effort=effort, enable_thinking=True)
            assert message_of(answer) == {"role": "assistant", "content": THOUGHT, "refusal": None}
            assert prompt_of(server).endswith("assistant\n")


@pytest.mark.parametrize(
    ("fields", "is_off"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "low"}, False),
        ({"enable_thinking": False}, True),
        ({"enable_thinking": True, "reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, False),
        ({"apply_chat_template_overrides": {"enable_thinking": False}}, True),
    ],
)
def test_reasoning_is_turned_off_in_templates_that_can(qwen: LiveServer, fields: dict[str, Any], is_off: bool) -> None:
    """Marks in the answer are then content, since the prompt has ended the reasoning."""
    qwen.engine.script = say(THOUGHT)
    assert split(qwen, **fields) == ((None, THOUGHT) if is_off else ("Is it?", "Yes."))
    assert prompt_of(qwen).endswith("assistant\n" + ("<think>\n\n</think>\n\n" if is_off else ""))


@pytest.mark.parametrize("effort", ["none", "low", "xhigh", None])
def test_the_effort_reaches_templates_that_know_it(effort: str | None, tmp_path: Path) -> None:
    with server_with(EFFORT_TEMPLATE, tmp_path) as server:
        server.engine.script = say("so</think>Yes")
        assert split(server, reasoning_effort=effort) == ("so", "Yes")
        assert ("effort=" in prompt_of(server), f"effort={effort}\n" in prompt_of(server)) == (
            bool(effort),
            bool(effort),
        )


def test_calls_follow_reasoning_and_never_begin_inside_it(qwen: LiveServer) -> None:
    call = HERMES.write("get_time", {})
    qwen.engine.script = say(f"<think>\nPerhaps {call}\n</think>\n\n{call}", f"<think>{call}", f"Now\n{call}")
    answer = ask(qwen, tools=TOOLS, n=3)
    messages = [message_of(answer, index) for index in range(3)]
    assert [message["reasoning"] for message in messages] == [f"Perhaps {call}", call, None]
    assert [message["content"] for message in messages] == [None, None, "Now"]
    assert [len(message.get("tool_calls", [])) for message in messages] == [1, 0, 1]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls", "stop", "tool_calls"]


@pytest.mark.parametrize("template", [QWEN3_TEMPLATE, R1_TEMPLATE])
def test_grammars_describe_the_whole_answer_without_reasoning(template: str, tmp_path: Path) -> None:
    """Also if the prompt has begun reasoning. Forced calls are calls."""
    with server_with(template, tmp_path) as server:
        server.engine.script = follow_grammars(tmp_path)
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        schema["additionalProperties"] = False
        format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        reasoning, content = split(server, response_format=format_)
        assert reasoning is None
        assert json.loads(content or "").keys() == {"a"}
        message = message_of(ask(server, tools=TOOLS[1:], tool_choice="required"))
        assert (message["reasoning"], message["content"]) == (None, None)
        assert [call["function"]["name"] for call in message["tool_calls"]] >= ["get_time"]


def test_logprobs_and_token_ids_are_of_all_tokens(qwen: LiveServer) -> None:
    qwen.engine.script = say(THOUGHT)
    (choice,) = ask(qwen, logprobs=True, return_token_ids=True)["choices"]
    assert choice["token_ids"] == [*THOUGHT.encode(), IM_END]
    assert bytes(byte for entry in choice["logprobs"]["content"][:-1] for byte in entry["bytes"]) == THOUGHT.encode()
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


def test_stop_strings_count_in_reasoning_too(qwen: LiveServer) -> None:
    qwen.engine.script = say(THOUGHT)
    assert split(qwen, stop=["it?"]) == ("Is", None)
    assert split(qwen, stop=["s."]) == ("Is it?", "Ye")


@pytest.mark.parametrize(
    ("content", "text", "expected"),
    [
        ("<think>\nIs", " it?</think>Yes.", ("it?", "Yes.")),
        ("Ye", "s.", (None, "s.")),
        ("Ye", " <think>s.", (None, " <think>s.")),
    ],
)
def test_a_continued_message_may_be_inside_reasoning(
    qwen: LiveServer, content: str, text: str, expected: tuple[str | None, str]
) -> None:
    qwen.engine.script = say(text)
    messages = [*QUESTION, {"role": "assistant", "content": content}]
    assert split(qwen, messages=messages, continue_final_message=True, separate_reasoning=None) == expected


def test_bulk_lines_and_batches_answer_as_live_requests(qwen: LiveServer) -> None:
    qwen.engine.script = say(THOUGHT)
    body = {"model": "default", "messages": QUESTION, "logprobs": True}
    live = ask(qwen, **body)
    line = orjson.dumps({"custom_id": "1", "url": CHAT, "body": body}) + b"\n"
    (result,) = map(orjson.loads, qwen.http.post("/v1/bulk", content=line).content.splitlines())
    assert result["response"]["body"]["choices"] == live["choices"]
    assert result["response"]["body"]["usage"] == live["usage"]
    method = {"custom_id": "1", "method": "POST", "url": CHAT, "body": body}
    fields = {"input_file_id": upload(qwen, orjson.dumps(method) + b"\n")["id"], "completion_window": "24h"}
    batch = qwen.http.post("/v1/batches", json=fields | {"endpoint": CHAT}).json()
    deadline = time.monotonic() + 60
    while batch["status"] != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
        batch = qwen.http.get(f"/v1/batches/{batch['id']}").json()
    answered = orjson.loads(qwen.http.get(f"/v1/files/{batch['output_file_id']}/content").content)
    assert answered["response"]["body"]["choices"] == live["choices"]
    assert batch["usage"]["output_tokens_details"] == live["usage"]["completion_tokens_details"]
