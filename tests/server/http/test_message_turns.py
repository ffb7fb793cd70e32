"""Turns of /v1/messages: each rule of Anthropic's reference for messages, compared with chats."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.server.helpers.live_server import LiveServer
from tests.server.helpers.message_events import checked_message, joined_message, without_ids
from tests.server.helpers.tool_answers import say, tool_server
from tokasaurus.server.served_model import ServedModel

CHAT, ROUTE, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"


@pytest.fixture(scope="module")
def live(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with tool_server("hermes", served_model, tmp_path_factory.mktemp("tokenizer")) as live:
        live.engine.script = say("B)")
        yield live


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if len(content) == 1 and isinstance(content[0], str) else content}


def assistant(*content: Any) -> dict[str, Any]:
    return user(*content) | {"role": "assistant"}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def use(id_: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": "get_time", "input": {"zone": id_}}


def result(id_: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": f"noon {id_}"}


def call(id_: str) -> dict[str, Any]:
    arguments = orjson.dumps({"zone": id_}).decode()
    return {"id": id_, "type": "function", "function": {"name": "get_time", "arguments": arguments}}


def answer_of(id_: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": f"noon {id_}"}


THINKING = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
ENABLED = {"type": "enabled", "budget_tokens": 1024}


def prompt_of(server: LiveServer, route: str, messages: list[Any], **fields: Any) -> list[int]:
    answer = server.http.post(route, json={"model": "default", "messages": messages, "max_tokens": 5, **fields})
    assert answer.status_code == 200, answer.text
    return server.engine.requests[-1].prompt_ids.tolist()


def check_equal(server: LiveServer, messages: list[Any], chat: list[Any], **fields: Any) -> None:
    """The messages give the prompt of the chat, and are counted so."""
    expected = prompt_of(server, CHAT, chat, **fields)
    assert prompt_of(server, ROUTE, messages) == expected
    counted = server.http.post(COUNT, json={"model": "default", "messages": messages})
    assert counted.json() == {"input_tokens": len(expected)}


def check_refused(server: LiveServer, messages: list[Any], words: str, **fields: Any) -> None:
    for route in (ROUTE, COUNT):
        body = {"model": "default", "messages": messages, **({"max_tokens": 5} if route == ROUTE else {}), **fields}
        answer = server.http.post(route, json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert words in error["message"]


@pytest.mark.parametrize(
    ("messages", "chat"),
    [
        ([user("Hello."), user("Warm?")], [user("Hello.\n\nWarm?")]),
        ([user(text("Hel"), text("lo.")), user("Warm?")], [user("Hello.\n\nWarm?")]),
        (
            [user("a"), assistant("On"), assistant(text("ce")), user("b"), user("c"), user("d")],
            [user("a"), assistant("Once"), user("b\n\nc\n\nd")],
        ),
        (
            [user("a"), assistant("See."), assistant(use("1")), user(result("1")), user("b")],
            [user("a"), assistant("See.") | {"tool_calls": [call("1")]}, answer_of("1"), user("b")],
        ),
        (
            [user("a"), assistant(use("1"), use("2")), user(result("2")), user(result("1"), text("b"))],
            [
                user("a"),
                assistant("") | {"tool_calls": [call("1"), call("2")]},
                answer_of("2"),
                answer_of("1"),
                user("b"),
            ],
        ),
    ],
)
def test_consecutive_messages_of_a_role_are_one_turn(live: LiveServer, messages: list[Any], chat: list[Any]) -> None:
    check_equal(live, messages, chat)


@pytest.mark.parametrize(
    ("messages", "chat"),
    [
        ([user("Sun?"), assistant("The best answer is (")], [user("Sun?"), assistant("The best answer is (")]),
        ([user("Sun?"), assistant(text("The best"), text(" answer"))], [user("Sun?"), assistant("The best answer")]),
        ([user("Sun?"), assistant("The best"), assistant(" answer")], [user("Sun?"), assistant("The best answer")]),
        (
            [user("Sun?"), assistant(THINKING, text("It is"))],
            [user("Sun?"), assistant("It is") | {"reasoning_content": "Hm."}],
        ),
        (
            [user("a"), assistant(use("1")), user(result("1")), assistant("So,")],
            [user("a"), assistant("") | {"tool_calls": [call("1")]}, answer_of("1"), assistant("So,")],
        ),
        ([assistant("Once")], [assistant("Once")]),
    ],
)
def test_a_last_message_of_the_assistant_is_continued(live: LiveServer, messages: list[Any], chat: list[Any]) -> None:
    check_equal(live, messages, chat, continue_final_message=True)


def test_the_answer_does_not_repeat_what_it_continues(live: LiveServer) -> None:
    body = {"model": "default", "messages": [user("Sun?"), assistant("The best answer is (")], "max_tokens": 5}
    whole = checked_message(live.http.post(ROUTE, json=body).content)
    assert [block["text"] for block in whole["content"]] == ["B)"]
    streamed = joined_message(live.http.post(ROUTE, json=body | {"stream": True}).content)
    assert without_ids(streamed) == without_ids(whole)


@pytest.mark.parametrize("empty", ["", [], [text("")]])
def test_an_empty_last_message_of_the_assistant_is_the_start_of_any_answer(live: LiveServer, empty: Any) -> None:
    check_equal(live, [user("Hello."), {"role": "assistant", "content": empty}], [user("Hello.")])


def test_a_body_may_ask_for_a_message_after_the_last_one(live: LiveServer) -> None:
    messages = [user("Sun?"), assistant("The best")]
    expected = prompt_of(live, CHAT, messages)
    for fields in (
        {"continue_final_message": False},
        {"add_generation_prompt": True},
        {"apply_chat_template_overrides": {"add_generation_prompt": True}},
    ):
        assert prompt_of(live, ROUTE, messages, **fields) == expected


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (assistant("The best "), "messages[1].content must not end with white space"),
        (assistant(text("The best"), text("\n")), "must not end with white space"),
        (assistant(text("x"), THINKING), "must not end with a block of type thinking"),
        (assistant({"type": "redacted_thinking", "data": "x"}), "must not end with a block of type redacted_thinking"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(live: LiveServer, last: dict[str, Any], words: str) -> None:
    check_refused(live, [user("Sun?"), last], words)


def test_with_thinking_enabled_what_is_continued_begins_with_thinking(live: LiveServer) -> None:
    check_refused(live, [user("Sun?"), assistant("It")], "must begin with a block of type thinking", thinking=ENABLED)
    prompt_of(live, ROUTE, [user("Sun?"), assistant(THINKING, text("It"))], thinking=ENABLED)
    prompt_of(live, ROUTE, [user("Sun?"), assistant("It"), user("Why?")], thinking=ENABLED)


def test_a_format_describes_a_whole_answer_and_not_the_rest_of_one(live: LiveServer) -> None:
    """Anthropic's reference: structured outputs do not go with the start of an answer."""
    format_ = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    start = [user("Sun?"), assistant("{")]
    check_refused(live, start, "output_config.format describes a whole answer", output_config=format_)
    prompt_of(live, ROUTE, start[:1], output_config=format_)
    prompt_of(live, ROUTE, [*start[:1], assistant("")], output_config=format_)
    prompt_of(live, ROUTE, start, output_config=format_, continue_final_message=False)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user("")], "messages[0].content must not be empty"),
        ([user()], "messages[0].content must not be empty"),
        ([user("a"), assistant(""), user("b")], "messages[1].content must not be empty"),
        ([user("a"), user(""), user("b")], "messages[1].content must not be empty"),
        ([user("a"), {"role": "system", "content": ""}], "messages[1].content must not be empty"),
        ([user(text("a"), text(""))], "messages[0].content[1].text must not be empty"),
        ([assistant("")], "messages must have a message with content"),
    ],
)
def test_messages_without_content_are_refused(live: LiveServer, messages: list[Any], words: str) -> None:
    check_refused(live, messages, words)


def test_answers_without_text_are_accepted_in_a_conversation(live: LiveServer) -> None:
    check_equal(live, [user("a"), assistant(text("")), user("b")], [user("a"), assistant(""), user("b")])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user("a"), assistant(use("1")), user("b")], "messages[2].content: each tool_use needs a tool_result"),
        ([user("a"), assistant(use("1"), use("2")), user(result("1"))], "there is none for '2'"),
        ([user("a"), assistant(use("1"))], "messages[1].content: each tool_use needs a tool_result"),
        (
            [user("a"), assistant(use("1")), {"role": "system", "content": "x"}, user(result("1"))],
            "messages[2].content: each tool_use needs a tool_result",
        ),
        (
            [user("a"), assistant(use("1")), user(text("b"), result("1"))],
            "messages[2].content[1] is of type tool_result",
        ),
        ([user("a"), assistant(use("1")), user("b"), user(result("1"))], "must come before all other blocks"),
        (
            [user("a"), assistant(use("1")), user(result("1"), result("1"))],
            "messages[2].content[1] has the tool_use_id",
        ),
        (
            [user("a"), assistant(use("1")), user(result("1")), assistant("b"), user(result("1"))],
            "messages[4].content[0] has the tool_use_id '1'",
        ),
        ([user(result("1"))], "messages[0].content[0] has the tool_use_id '1'"),
        ([user("a"), assistant(use("1"), use("1")), user(result("1"))], "several blocks of type tool_use with one id"),
    ],
)
def test_each_call_has_one_result_at_the_beginning_of_the_next_turn(
    live: LiveServer, messages: list[Any], words: str
) -> None:
    check_refused(live, messages, words)


def test_very_many_missing_results_are_not_all_named(live: LiveServer) -> None:
    calls = [use(f"{index:04}") for index in range(3000)]
    check_refused(live, [user("a"), assistant(*calls), user("b")], "none for '0000', '0001', ")
    check_refused(live, [user("a"), assistant(*calls), user("b")], "'0009' and 2990 others")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Be short."}, user("a")],
        [user("a"), {"role": "system", "content": "Be short."}],
        [user("a"), assistant("b"), {"role": "system", "content": "Be short."}, user("c")],
    ],
)
def test_system_messages_are_where_the_client_puts_them(live: LiveServer, messages: list[Any]) -> None:
    check_equal(live, messages, messages)


@pytest.mark.parametrize("fields", [{"clear_at": "next_user_message"}, {"output_config": {"effort": "low"}}])
def test_what_a_system_message_cannot_do_is_refused_by_name(live: LiveServer, fields: dict[str, Any]) -> None:
    check_refused(live, [user("a"), {"role": "system", "content": "x", **fields}], f"messages[1].{next(iter(fields))}")
