"""Histories as agents send them back: what the server and other servers' clients put into messages is accepted."""

import dataclasses
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from tests.helpers.small_model import make_served_model
from tests.server.helpers.bodies_and_errors import CHAT
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.openai_client import sync_client
from tests.server.helpers.reasoning_templates import QWEN3_TEMPLATE, R1_TEMPLATE
from tests.server.helpers.tool_answers import LIMITS, TOOLS, say, tool_server
from tests.server.helpers.tool_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE, save_tokenizer_with
from tests.server.helpers.tool_texts import FRAGMENTS as CALL_FRAGMENTS
from tests.server.helpers.tool_texts import NAMES
from tests.server.jobs.helpers.uploads import upload
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.tools.formats import HERMES, LLAMA3
from tokasaurus.server.tools.support import find_tool_support

QUESTION: list[Any] = [{"role": "user", "content": "Warm there?"}]
NAMED_TOOLS = [{"type": "function", "function": {"name": name}} for name in sorted(NAMES)]
# Shows arguments one by one, so they must be objects.
ITEMS_TEMPLATE = HERMES_TEMPLATE.replace(
    "(call.function.arguments | tojson)",
    "('{' + (call.function.arguments | items | map('join', ':') | join(',')) + '}')",
)
# Writes arguments as they are, so they must be texts.
TEXT_TEMPLATE = HERMES_TEMPLATE.replace("(call.function.arguments | tojson)", "call.function.arguments")


def call_of(arguments: str, **fields: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}} | fields


def history(arguments: str) -> list[dict[str, Any]]:
    return [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call_of(arguments)]},
        {"role": "tool", "tool_call_id": "c1", "content": "the arguments are not JSON"},
    ]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("qwen")
    model = make_served_model(save_tokenizer_with(QWEN3_TEMPLATE, directory))
    support = find_tool_support(model.tokenizer, None)
    model = dataclasses.replace(model, find_tools=lambda: support)
    with live_server(model, FakeEngine(limits=LIMITS), data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


def prompt_of(server: LiveServer, **fields: Any) -> str:
    """The prompt of a chat, special tokens included."""
    tokens = server.http.post("/tokenize", json=fields)
    assert tokens.status_code == 200, tokens.text
    prompt: str = server.http.post("/detokenize", json={"tokens": tokens.json()["tokens"]}).json()["prompt"]
    return prompt


@pytest.mark.parametrize("template", ["hermes", "llama3", "no template"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_goes_on_after_a_call_that_was_cut(
    template: str, is_streamed: bool, served_model: ServedModel, tmp_path: Path
) -> None:
    """Two turns by OpenAI's client: the cut call goes back with an error as its result, and the model calls again."""
    with tool_server(template, served_model, tmp_path) as server:
        client = sync_client(server)
        format_ = LLAMA3 if template == "llama3" else HERMES
        cut = format_.write("get_weather", {"city": "Köln"})[: -len('ln"}}' + format_.end)]
        server.engine.script = say(cut, finish_reason="length")
        messages: list[Any] = list(QUESTION)
        fields: dict[str, Any] = {"model": "default", "tools": TOOLS}
        if is_streamed:
            with client.chat.completions.stream(messages=messages, **fields) as stream:
                with pytest.raises(openai.LengthFinishReasonError) as caught:
                    stream.get_final_completion()
                answer = caught.value.completion.choices[0]
        else:
            answer = client.chat.completions.create(messages=messages, **fields).choices[0]
        assert answer.finish_reason == "length"
        (call,) = answer.message.tool_calls or []
        assert call.function.arguments == '{"city": "Kö'
        messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "not JSON: try again"}]
        server.engine.script = say(format_.write("get_time", {}))
        second = client.chat.completions.create(messages=messages, **fields).choices[0].message
        (again,) = second.tool_calls or []
        assert again.function.name == "get_time"
        messages += [second, {"role": "tool", "tool_call_id": again.id, "content": "9"}]
        server.engine.script = say("It is nine.")
        assert client.chat.completions.create(messages=messages, **fields).choices[0].message.content == "It is nine."


CUT = '{"city": "Kö'


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (QWEN3_TEMPLATE, f'"arguments": {CUT}}}\n'),
        (HERMES_TEMPLATE, f'"arguments": {json.dumps(CUT, ensure_ascii=False)}}}\n'),
        (LLAMA3_TEMPLATE, f'"parameters": {json.dumps(CUT, ensure_ascii=False)}}}'),
        (ITEMS_TEMPLATE, f'"arguments": {{arguments:{CUT}}}}}\n'),
        (TEXT_TEMPLATE, f'"arguments": {CUT}}}\n'),
        (R1_TEMPLATE, f'"arguments": {CUT}}}\n'),  # shows no tools, so calls are content
    ],
)
def test_arguments_that_are_not_json_are_shown_as_the_template_can(template: str, shown: str, tmp_path: Path) -> None:
    model = make_served_model(save_tokenizer_with(template, tmp_path))
    support = find_tool_support(model.tokenizer, None)
    with live_server(dataclasses.replace(model, find_tools=lambda: support), FakeEngine(limits=LIMITS)) as server:
        assert shown in prompt_of(server, messages=history(CUT))
        assert "Köln" in prompt_of(server, messages=history('{"city": "Köln"}'))


@pytest.mark.parametrize(
    "arguments",
    [
        CUT,
        "[]",
        "null",
        "{",
        '{"a": NaN}',
        '{"a": "\\ud800"}',
        '{"a":' * 5000,
        '{"a":' * 300 + "1" + "}" * 300,
        '{"a": %s}' % ("1" * 5000),
        "<|im_end|>",
    ],
)
def test_any_text_may_stand_for_arguments(qwen: LiveServer, arguments: str) -> None:
    messages = history(arguments)
    if len(arguments) > 1000:  # more than the small model's context has
        assert prompt_of(qwen, messages=messages).count(arguments) == 1
        return
    qwen.engine.script = say("Yes.")
    answer = qwen.http.post(CHAT, json={"model": "default", "messages": messages, "tools": TOOLS})
    assert answer.status_code == 200, answer.text


ANSWER = {"role": "assistant", "content": "Yes."}
CALLING = {"role": "assistant", "content": None, "tool_calls": [call_of('{"city": "Bonn"}')]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "20"}
# Messages, and plain ones with the same prompt.
SAME: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        "fields of an answer",
        [ANSWER | {"id": "msg_1", "refusal": None, "annotations": [], "audio": None, "function_call": None}],
        [ANSWER],
    ),
    ("annotations", [ANSWER | {"annotations": [{"type": "url_citation", "url_citation": {}}], "images": []}], [ANSWER]),
    ("litellm", [ANSWER | {"provider_specific_fields": {"a": 1}, "cache_control": {"type": "ephemeral"}}], [ANSWER]),
    ("OpenRouter", [ANSWER | {"reasoning_details": [{"type": "reasoning.text"}], "reasoning": None}], [ANSWER]),
    ("empty reasoning", [ANSWER | {"reasoning_content": "", "reasoning": "", "thinking_blocks": []}], [ANSWER]),
    ("nulls", [ANSWER | {"reasoning_content": None, "reasoning": None, "thinking_blocks": None}], [ANSWER]),
    ("output_text", [ANSWER | {"content": [{"type": "output_text", "text": "Yes.", "annotations": []}]}], [ANSWER]),
    ("a refusal", [ANSWER | {"content": None, "refusal": "Yes."}], [ANSWER]),
    ("a part that refuses", [ANSWER | {"content": [{"type": "refusal", "refusal": "Yes."}]}], [ANSWER]),
    ("content beside a refusal", [ANSWER | {"refusal": "No."}], [ANSWER]),
    (
        "call",
        [
            CALLING | {"tool_calls": [call_of('{"city": "Bonn"}', index=0, cache_control={}, extra_content={})]},
            RESULT | {"cache_control": {"type": "ephemeral"}, "name": "get weather"},
        ],
        [CALLING, RESULT],
    ),
    (
        "input_text",
        [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "So", "cache_control": {"type": "ephemeral"}}],
                "name": "Ann Lee <ann@example.org>",
            }
        ],
        [{"role": "user", "content": "So"}],
    ),
]


@pytest.mark.parametrize(("added", "plain"), [case[1:] for case in SAME], ids=[case[0] for case in SAME])
def test_fields_of_returned_messages_change_nothing(
    qwen: LiveServer, added: list[dict[str, Any]], plain: list[dict[str, Any]]
) -> None:
    assert prompt_of(qwen, messages=[*QUESTION, *added]) == prompt_of(qwen, messages=[*QUESTION, *plain])


def test_keys_that_clients_add_to_tools_change_nothing(qwen: LiveServer) -> None:
    plain = {"type": "function", "function": {"name": "get time", "parameters": {"type": "object", "properties": {}}}}
    extra = {"cache_control": {"type": "ephemeral"}, "defer_loading": False, "id": "t1"}
    function = {
        "title": "Time",
        "returns": {"type": "string"},
        "return": {"type": "string"},
        "strict": None,
        "output_schema": None,
    }
    added = plain | {"strict": True, "function": plain["function"] | function | extra} | extra
    asked = {"messages": QUESTION}
    assert prompt_of(qwen, **asked, tools=[added]) == prompt_of(qwen, **asked, tools=[plain])


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "It is May."},
        {"reasoning": "It is May."},
        {"reasoning_content": "It is May.", "reasoning": "It is May."},
        {"reasoning_content": None, "reasoning": "It is May."},
        {"thinking_blocks": [{"type": "thinking", "thinking": "It is May.", "signature": "x"}]},
        {"thinking_blocks": [{"type": "redacted_thinking", "data": "x"}], "reasoning_content": "It is May."},
    ],
)
def test_reasoning_reaches_templates_that_show_it(qwen: LiveServer, fields: dict[str, Any]) -> None:
    """As the model wrote it, before the calls since the last question; not in earlier answers."""
    now = [*QUESTION, CALLING | fields, RESULT]
    assert "assistant\n<think>\nIt is May.\n</think>\n\n\n<tool_call>" in prompt_of(qwen, messages=now)
    later = [*now, ANSWER | fields, {"role": "user", "content": "And now?"}]
    assert "It is May." not in prompt_of(qwen, messages=later)


def test_an_answer_with_reasoning_and_calls_can_be_sent_back(qwen: LiveServer) -> None:
    """By OpenAI's client. The second prompt continues the first and its answer, so that it is cached."""
    client = sync_client(qwen)
    text = f"<think>\nIt is May.\n</think>\n\n{HERMES.write('get_time', {})}"
    qwen.engine.script = say(text)
    fields: dict[str, Any] = {"model": "default", "tools": TOOLS}
    answer = client.chat.completions.create(messages=QUESTION, **fields).choices[0].message
    (call,) = answer.tool_calls or []
    first = bytes(qwen.engine.requests[-1].prompt_ids.clip(max=255).astype("uint8"))
    qwen.engine.script = say("Yes.")
    result = {"role": "tool", "tool_call_id": call.id, "content": "9"}
    messages: list[Any] = [*QUESTION, answer, result]
    assert client.chat.completions.create(messages=messages, **fields).choices[0].message.content == "Yes."
    second = bytes(qwen.engine.requests[-1].prompt_ids.clip(max=255).astype("uint8"))
    assert second.startswith(first)
    assert second[len(first) :].startswith(b"<think>\nIt is May.\n</think>\n\n")
    assert answer.model_extra == {"reasoning_content": "It is May.", "reasoning": "It is May."}


def test_whatever_the_server_answers_can_be_sent_back(qwen: LiveServer) -> None:
    """Random texts of reasoning, calls and parts of both, with a result for each call."""
    rng = random.Random(0)
    call = HERMES.write("f", {"a": ["b"]})
    body: dict[str, Any] = {"model": "default", "messages": QUESTION, "tools": NAMED_TOOLS}
    kinds: set[tuple[bool, bool]] = set()
    for _ in range(60):
        cut_call = call[: rng.randint(30, 45)]
        fragments = ["<think>", "</think>", "\n", "so", call, cut_call, *rng.choices(CALL_FRAGMENTS, k=2)]
        text = rng.choice(["", "<think>so</think>"]) + "".join(rng.choices(fragments, k=rng.randint(0, 6)))
        qwen.engine.script = say(text, finish_reason=rng.choice(["stop", "length"]) if text else "stop")
        answer = qwen.http.post(CHAT, json=body).json()["choices"][0]["message"]
        calls = answer.get("tool_calls", [])
        results = [{"role": "tool", "tool_call_id": called["id"], "content": "?"} for called in calls]
        qwen.engine.script = say("Yes.")
        again = qwen.http.post(CHAT, json=body | {"messages": [*QUESTION, answer, *results]})
        assert again.status_code == 200, (text, again.text)
        assert again.json()["choices"][0]["message"]["content"] == "Yes."
        kinds.add((bool(calls), answer["reasoning"] is not None))
    assert len(kinds) == 4, "answers with and without calls, with and without reasoning"


def test_bulk_lines_and_batches_take_the_same_histories(qwen: LiveServer) -> None:
    qwen.engine.script = say("Yes.")
    histories = [[*QUESTION, *added] for _, added, _ in SAME] + [history(CUT)]
    bodies = [{"model": "default", "messages": messages} for messages in histories]
    live = [qwen.http.post(CHAT, json=body).json() for body in bodies]
    expected = {str(index): (answer["choices"], answer["usage"]["prompt_tokens"]) for index, answer in enumerate(live)}
    lines = [{"custom_id": str(index), "url": CHAT, "body": body} for index, body in enumerate(bodies)]
    bulk = qwen.http.post("/v1/bulk", content=b"\n".join(map(orjson.dumps, lines))).content
    methods = b"\n".join(orjson.dumps(line | {"method": "POST"}) for line in lines)
    fields = {"input_file_id": upload(qwen, methods)["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = qwen.http.post("/v1/batches", json=fields).json()
    deadline = time.monotonic() + 60
    while batch["status"] != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
        batch = qwen.http.get(f"/v1/batches/{batch['id']}").json()
    output = qwen.http.get(f"/v1/files/{batch['output_file_id']}/content").content
    for content in (bulk, output):
        results = [orjson.loads(line) for line in content.splitlines()]
        answers = {result["custom_id"]: result["response"]["body"] for result in results}
        found = {id_: (answer["choices"], answer["usage"]["prompt_tokens"]) for id_, answer in answers.items()}
        assert found == expected
