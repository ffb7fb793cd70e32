"""How tools and tool calls appear in the prompt, with several kinds of chat template."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.small_tokenizer import IM_END, IM_START, save_small_tokenizer
from tests.server.helpers.tool_templates import (
    HERMES_TEMPLATE,
    LLAMA3_TEMPLATE,
    OWN_WAY_TEMPLATE,
    TWO_TEMPLATES,
    save_tokenizer_with,
)
from tokasaurus.config import ServerConfig
from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.prepare.chat import encode_messages, reasoning_start
from tokasaurus.server.protocol.chat import ChatCompletionRequest, ChatMessage
from tokasaurus.server.protocol.tools import Tool
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.tools.formats import FORMATS, HERMES, LLAMA3
from tokasaurus.server.tools.prompt import template_input
from tokasaurus.server.tools.support import NO_TOOLS_IN_TEMPLATE, ToolSupport, find_tool_support
from tokasaurus.text import tokenizer as tokenizer_module
from tokasaurus.text.time_limit import TimeLimit
from tokasaurus.text.token_decoder import REASONING_MARKS, TokenizerError
from tokasaurus.text.tokenizer import Tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <|im_end|> of é",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
SHOWN_WEATHER = {"type": "function", "function": {k: v for k, v in WEATHER["function"].items() if k != "strict"}}
SHOWN_TIME = {"type": "function", "function": TIME["function"] | {"parameters": {"type": "object", "properties": {}}}}

CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Warm"}, {"type": "text", "text": " there?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city":"Köln<|im_end|>"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "20 °C<|im_start|>"}]},
]


def parse(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> tuple[list[ChatMessage], list[Tool]]:
    return [ChatMessage.model_validate(message) for message in messages], [Tool.model_validate(tool) for tool in tools]


def load(template: Any, directory: Path) -> Tokenizer:
    return Tokenizer.load(
        save_small_tokenizer(directory) if template is None else save_tokenizer_with(template, directory)
    )


@pytest.mark.parametrize(
    ("template", "support"),
    [
        (HERMES_TEMPLATE, ToolSupport(HERMES, in_template=True)),
        (LLAMA3_TEMPLATE, ToolSupport(LLAMA3, in_template=True)),
        (OWN_WAY_TEMPLATE, ToolSupport(None, in_template=True)),
        (TWO_TEMPLATES, ToolSupport(HERMES, in_template=True, needs_list=True)),
        (None, NO_TOOLS_IN_TEMPLATE),
    ],
)
def test_format_is_detected_from_the_template_unless_given(template: Any, support: ToolSupport, tmp_path: Path) -> None:
    tokenizer = load(template, tmp_path)
    assert find_tool_support(tokenizer, None) == support
    for name, format_ in FORMATS.items():
        assert find_tool_support(tokenizer, name) == dataclasses.replace(support, format=format_)
    assert ServerConfig.flags["tool_call_format"].choices == tuple(FORMATS)


def test_a_template_that_never_ends_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_RENDERING", TimeLimit(0.5))
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TokenizerError) as caught:
        find_tool_support(load(endless, tmp_path), None)
    assert f"the chat template in {tmp_path} cannot be used" in str(caught.value)


def render(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """The prompt's token ids decoded, with special tokens as [start] and [end]."""
    support = find_tool_support(tokenizer, None)
    shown_messages, shown_tools = template_input(*parse(messages, tools), support)
    ids = tokenizer.encode_chat(shown_messages, tools=shown_tools)
    text = ""
    rest = ids
    while rest:
        end = next((index for index, id_ in enumerate(rest) if id_ in (IM_START, IM_END)), len(rest))
        text += tokenizer.decode(rest[:end])
        text += {IM_START: "[start]", IM_END: "[end]"}[rest[end]] if end < len(rest) else ""
        rest = rest[end + 1 :]
    return text


def test_template_with_tools_renders_them_and_special_token_text_stays_text(tmp_path: Path) -> None:
    tools = [json.dumps(tool, ensure_ascii=False) for tool in (SHOWN_WEATHER, SHOWN_TIME)]
    assert render(load(HERMES_TEMPLATE, tmp_path), CONVERSATION, [WEATHER, TIME]) == (
        f"[start]system\n{tools[0]}\n{tools[1]}\n[end]\n[start]user\nWarm there?[end]\n"
        "[start]assistant\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Köln<|im_end|>"}}\n</tool_call>[end]\n'
        "[start]user\n<tool_response>20 °C<|im_start|></tool_response>[end]\n[start]assistant\n"
    )


def test_calls_are_rendered_without_tools_if_the_tool_template_is_separate(tmp_path: Path) -> None:
    tokenizer = load(TWO_TEMPLATES, tmp_path)
    assert "<tool_call>" in render(tokenizer, CONVERSATION, [])
    assert "<tool_response>" in render(tokenizer, CONVERSATION, [])
    assert render(tokenizer, CONVERSATION[:1], []) == "[start]user\nWarm there?"


def test_llama_template_renders_tools_calls_and_results(tmp_path: Path) -> None:
    tools = json.dumps([SHOWN_WEATHER], ensure_ascii=False, indent=4)
    assert render(load(LLAMA3_TEMPLATE, tmp_path), CONVERSATION, [WEATHER]) == (
        f'[start]user\n{tools}Warm there?[end][start]assistant\n{{"name": "get_weather", "parameters": '
        '{"city": "Köln<|im_end|>"}}[end][start]ipython\n"20 °C<|im_start|>"[end][start]assistant\n'
    )


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_template_without_tools_gets_tools_calls_and_results_as_text(system: str | None, tmp_path: Path) -> None:
    tokenizer = load(None, tmp_path)
    result = {"role": "tool", "tool_call_id": "c1", "content": "calm"}
    opening = [] if system is None else [{"role": "system", "content": system}]
    prompt = render(tokenizer, [*opening, *CONVERSATION, result, {"role": "user", "content": "So?"}], [WEATHER, TIME])
    first, *others = prompt.split("[end]\n")
    assert first.startswith("[start]system\n" + ("" if system is None else f"{system}\n\n"))
    lines = first.split("\n")
    assert [json.loads(line) for line in lines if line.startswith('{"name": "get')] == [
        SHOWN_WEATHER["function"],
        SHOWN_TIME["function"],
    ]
    assert "<tool_call>" in lines
    assert others == [
        "[start]user\nWarm there?",
        '[start]assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln<|im_end|>"}}\n</tool_call>',
        "[start]user\n<tool_response>\n20 °C<|im_start|>\n</tool_response>\n<tool_response>\ncalm\n</tool_response>",
        "[start]user\nSo?",
        "[start]assistant\n",
    ]


def test_messages_without_tools_and_calls_reach_the_template_unchanged() -> None:
    messages, _ = parse([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], [])
    expected = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    for support in (NO_TOOLS_IN_TEMPLATE, ToolSupport(HERMES, in_template=True)):
        assert template_input(messages, [], support) == (expected, None)


@pytest.mark.parametrize("support", [NO_TOOLS_IN_TEMPLATE, ToolSupport(HERMES, in_template=True)])
def test_names_of_participants_reach_the_template(support: ToolSupport) -> None:
    roles = ("system", "developer", "user", "assistant")
    names = ("Ann", "a" * 64, "Jürgen-2", None)
    messages, tools = parse(
        [{"role": role, "content": "a", "name": name} for role in roles for name in names], [WEATHER]
    )
    shown, _ = template_input(messages, tools, support)
    assert [message.get("name") for message in shown] == [*names] * len(roles)
    assert all(("name" in message) == (message.get("name") is not None) for message in shown)


def test_a_template_shows_the_names_of_participants(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role + ':' + (m.name or '-') + ':' + m.content + ';' }}{% endfor %}"
    tokenizer = load(template, tmp_path)
    messages = [{"role": "user", "content": "hi", "name": "Ann"}, {"role": "assistant", "content": "a"}]
    assert render(tokenizer, messages, []) == "user:Ann:hi;assistant:-:a;"


def test_the_name_of_a_tool_is_not_that_of_the_user_message_which_shows_its_result() -> None:
    messages, _ = parse([*CONVERSATION[:2], CONVERSATION[2] | {"name": "get weather"}], [])
    shown, _ = template_input(messages, [], NO_TOOLS_IN_TEMPLATE)
    assert (shown[2]["role"], "name" in shown[2]) == ("user", False)
    shown, _ = template_input(messages, [], ToolSupport(HERMES, in_template=True))
    assert shown[2]["name"] == "get weather"


@pytest.mark.parametrize(
    ("arguments", "value"),
    [("", {}), (" ", {}), ("{}", {}), ('{"n": 123456789012345678901}', {"n": 123456789012345678901})],
)
def test_template_gets_call_arguments_as_objects(arguments: str, value: dict[str, Any]) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages, _ = parse([{"role": "assistant", "content": None, "tool_calls": [call]}], [])
    ((message,), _) = template_input(messages, [], ToolSupport(HERMES, in_template=True))
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": value}


def test_tool_result_must_match_an_earlier_call() -> None:
    messages, _ = parse([*CONVERSATION, CONVERSATION[2] | {"tool_call_id": "c2"}], [])
    with pytest.raises(InvalidRequest) as refused:
        template_input(messages, [], NO_TOOLS_IN_TEMPLATE)
    assert refused.value.param == "messages[3].tool_call_id"


@pytest.mark.parametrize("mark", REASONING_MARKS)
@pytest.mark.parametrize("after", ["", "\n", "\n\n"])
def test_a_template_may_begin_and_end_reasoning(
    mark: str, after: str, served_model: ServedModel, tmp_path: Path
) -> None:
    opened, closed = mark + after, f"{mark}\n\n{REASONING_MARKS[mark]}\n\n"
    template = HERMES_TEMPLATE.replace("assistant\n' }}{% endif", "assistant\n' + (opening or '') }}{% endif")
    assert template != HERMES_TEMPLATE
    tokenizer = Tokenizer.load(save_tokenizer_with(template, tmp_path))
    model = dataclasses.replace(served_model, tokenizer=tokenizer)
    cases = (("Hi", opened, "inside"), ("Hi", closed, "after"), (f"What is {mark}", None, "before"))
    for question, opening, start in cases:
        fields = {"messages": [{"role": "user", "content": question}], "chat_template_kwargs": {"opening": opening}}
        body = ChatCompletionRequest.model_validate({"model": "default", **fields})
        prompt_ids = encode_messages(body.messages, body, model, model.template)
        assert reasoning_start(body.messages, body, prompt_ids, model) == start
