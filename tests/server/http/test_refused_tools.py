"""Bodies with wrong tools, or wrong calls in messages, are refused with a 400 that names the field."""

import functools
from typing import Any

import pytest

from tests.server.helpers.bodies_and_errors import CHAT, check_refused, minimal_body
from tests.server.helpers.live_server import LiveServer

TOOL = {"type": "function", "function": {"name": "f"}}
NESTED: dict[str, Any] = functools.reduce(lambda inner, _: {"a": inner}, range(300), {})
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


def _with_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


WRONG_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "function", "content": "a", "name": "f"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "content": "a", "tool_call_id": 5}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "tool", "content": None, "tool_call_id": "x"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [5] * 100_000}]}, "messages[0].tool_calls[0]"),
    *(
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL | change]}]},
            f"messages[0].tool_calls[0].{name}",
        )
        for change, name in (
            ({"id": None}, "id"),
            ({"id": ""}, "id"),
            ({"type": "custom"}, "type"),
            ({"type": 5}, "type"),
            ({"index": "0"}, "index"),
            ({"function": {"name": "f"}}, "function.arguments"),
            ({"function": {"name": "", "arguments": "{}"}}, "function.name"),
            ({"function": {"name": "f", "arguments": {}}}, "function.arguments"),
            ({"more": 1}, "more"),
            ({"function": {"name": "f", "arguments": "{}", "more": 1}}, "function.more"),
        )
    ),
]
WRONG_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [TOOL], "guided_regex": "a"}, "guided_regex"),
    ({"tools": [TOOL], "tool_choice": "required", "guided_choice": ["a"]}, "guided_choice"),
    ({"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"tools": [5] * 100_000}, "tools[0]"),
    ({"tools": [TOOL] * 1025}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL | {"more": 1}]}, "tools[0].more"),
    *(
        ({"tools": [TOOL, {"type": "function", "function": {"name": "g"} | change}]}, f"tools[1].function.{name}")
        for name, change in (
            ("name", {"name": None}),
            ("name", {"name": ""}),
            ("name", {"name": " a"}),
            ("name", {"name": "a "}),
            ("name", {"name": "f\n"}),
            ("name", {"name": "é"}),
            ("name", {"name": "f" * 65}),
            ("description", {"description": 5}),
            ("parameters", {"parameters": "{}"}),
            ("parameters", {"parameters": True}),
            ("parameters", {"parameters": NESTED}),
            ("strict", {"strict": 1}),
            ("more", {"more": None}),
        )
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tool_choice": ALLOWED}, "tool_choice"),
    *(
        ({"tools": [TOOL], "tool_choice": choice}, "tool_choice")
        for choice in (
            "any",
            5,
            {},
            {"type": "function", "function": {"name": "g"}},
            {"type": "function", "function": {"name": 5}},
            {"type": "function", "function": "f"},
            {"type": "function", "name": "f"},
            NAMED | {"more": 1},
            {"type": "custom", "custom": {"name": "f"}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": [NAMED]}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "custom"}]}},
            {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]},
        )
    ),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    *(
        ({"tools": [_with_parameters(parameters)], "tool_choice": choice}, param)
        for choice in (
            "required",
            NAMED,
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
        )
        for parameters, param in (
            ({"type": "string"}, "tools[0].function.parameters"),
            ({"type": "object", "properties": {"a": {"type": "wish"}}}, "tools[0].function.parameters"),
            ({"$ref": "#/$defs/missing"}, "tools[0].function.parameters"),
            ({"x-guidance": {}}, "tools[0].function.parameters"),
        )
    ),
]


@pytest.mark.parametrize(("change", "param"), WRONG_MESSAGES + WRONG_TOOLS)
def test_wrong_tools_are_a_400_naming_the_field(shared_server: LiveServer, change: dict[str, Any], param: str) -> None:
    check_refused(shared_server, CHAT, minimal_body(CHAT) | change, param)


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}])
def test_the_error_names_the_tool_with_the_wrong_schema(shared_server: LiveServer, fields: dict[str, Any]) -> None:
    wrong = {"name": "g", "parameters": {"properties": {"a": {"pattern": "("}}}, "strict": True}
    tools = [TOOL, {"type": "function", "function": wrong}]
    response = shared_server.http.post(CHAT, json=minimal_body(CHAT) | {"tools": tools} | fields)
    error = response.json()["error"]
    param = "tools[1].function.parameters"
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param} contains a pattern at #/properties/a/pattern that ")
