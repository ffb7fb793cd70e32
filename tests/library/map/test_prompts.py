"""Templates, columns and functions give prompts, and say what is wrong with a row or with themselves."""

import asyncio
from typing import Any

import pytest

from tokasaurus.library.map.prompts import NoPrompt, Prompts
from tokasaurus.library.map.sources import open_source

ROW = {"question": "why?", "level": 3, "tags": ["a", "b"], "empty": None, "x y": 1.5}


def prompts(prompt: Any = None, messages: Any = None, chat: bool = False) -> Prompts:
    return Prompts(open_source([ROW]), prompt, messages, chat)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{question}", "why?"),
        ("Q: {question}\nLevel {level}\n{question}", "Q: why?\nLevel 3\nwhy?"),
        ('{{"q": {question}}} }}', '{"q": why?} }'),
        ("{tags} {x y}", '["a","b"] 1.5'),
        ("{{}}", "{}"),
    ],
)
def test_templates(template: str, text: str) -> None:
    assert prompts(template).make(ROW) == text


def test_only_the_columns_of_a_template_are_read() -> None:
    assert prompts("{level} {question} {level}").columns == ["level", "question"]
    assert prompts("question").columns == ["question"]
    assert prompts(lambda row: row["question"]).columns is None


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"prompt": "{nothing}"}, "an iterable of dicts has no column 'nothing'; its columns are question, level"),
        ({"prompt": "Answer this"}, r"no column 'Answer this' \(a template has \{\}, as .*; its columns are"),
        ({"prompt": "{}"}, r"\{\} has no column"),
        ({"prompt": "{question"}, "expected '}' before end of string; {{ and }} are braces"),
        ({"prompt": "{question:>10}"}, r"\{question\} has a format, and only the column can be given"),
        ({"prompt": "{question!r}"}, r"\{question\} has a format"),
        ({"messages": "{question}"}, r"messages='\{question\}': .* has no column"),
    ],
)
def test_wrong_templates_are_refused_at_once(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        prompts(**arguments)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "map needs either prompt= or messages="),
        ({"prompt": "question", "messages": "question"}, "map needs either prompt= or messages="),
        ({"prompt": 17}, "prompt must be a string or a function of the row, not int"),
        ({"prompt": asyncio.sleep}, "prompt must be a function that returns the prompt, not an async one"),
        ({"messages": "tags", "chat": True}, "chat=True goes with prompt="),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        prompts(**arguments)


def test_rows_without_a_prompt_say_why() -> None:
    def failing(_row: Any) -> str:
        raise KeyError("missing")

    for arguments, match in (
        ({"prompt": "{empty}"}, "the column 'empty' is null"),
        ({"prompt": "empty"}, "the column 'empty' is null"),
        ({"prompt": lambda row: row["empty"]}, "it is None"),
        ({"prompt": failing}, "the function of prompt= failed: KeyError: 'missing'"),
        ({"messages": failing}, "the function of messages= failed"),
        ({"messages": lambda row: row["question"]}, "messages must be a list of dicts, not a text"),
        ({"messages": "tags"}, "messages must be a list of dicts that is not empty"),
        ({"messages": lambda _: []}, "messages must be a list of dicts that is not empty"),
    ):
        with pytest.raises(NoPrompt, match=match):
            prompts(**arguments).make(ROW)


def test_a_function_may_change_the_row_that_it_gets() -> None:
    row = dict(ROW)
    assert prompts(lambda row: row.pop("question")).make(row) == "why?"
    assert row == ROW


def test_chats() -> None:
    message = {"role": "user", "content": "why?", "name": None}
    sent = [{"role": "user", "content": "why?"}]
    assert prompts("{question}", chat=True).make(ROW) == sent
    assert prompts(lambda _: [message]).make(ROW) == sent
    assert prompts(messages=lambda _: [message]).make(ROW) == sent
    assert prompts(lambda _: [1, 2, 3]).make(ROW) == [1, 2, 3]


def test_members_of_parts_that_are_null_are_left_out() -> None:
    """As a column of parts of several kinds has them."""
    sent = {"name": "f", "arguments": "{}"}
    function = {**sent, "strict": None}
    stored = [
        {"role": "user", "content": [{"type": "text", "text": "why?", "image_url": None}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]},
    ]
    assert prompts(messages=lambda _: stored).make(ROW) == [
        {"role": "user", "content": [{"type": "text", "text": "why?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
    ]


def test_surrogates_reach_the_check_of_the_request() -> None:
    assert prompts("{question}").make({"question": "a\ud800"}) == "a\ud800"
