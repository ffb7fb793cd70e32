"""Tool calls through the real OpenAI client, unstreamed and streamed, sync and async."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion

from tests.helpers.examples import IS_NIGHTLY, few
from tests.helpers.small_tokenizer import IM_END, IM_START
from tests.server.helpers.fake_engine import Reply
from tests.server.helpers.grammar_script import follow_grammars
from tests.server.helpers.live_server import LiveServer
from tests.server.helpers.openai_client import sync_client
from tests.server.helpers.tool_answers import QUESTION, TOOLS, GetWeather, ask, say, tool_server, write_calls
from tokasaurus.server.served_model import ServedModel


@pytest.fixture(scope="module", params=["hermes", "llama3", "no template"])
def server(request: pytest.FixtureRequest, served_model: ServedModel, tmp_path_factory: Any) -> Iterator[LiveServer]:
    with tool_server(request.param, served_model, tmp_path_factory.mktemp("tokenizer")) as live:
        yield live


def called(answer: ChatCompletion, index: int = 0) -> list[tuple[str, Any]]:
    calls: Any = answer.choices[index].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_each_choice_has_its_content_and_tool_calls(server: LiveServer) -> None:
    calls = ("get_weather", {"city": "Köln"}), ("get_time", {})
    server.engine.script = say(write_calls(server, *calls), "Let me see.\n" + write_calls(server, calls[1]), "No.", "")
    answer = ask(server, n=4, logprobs=True)
    assert [choice.message.content for choice in answer.choices] == [None, "Let me see.", "No.", ""]
    assert [called(answer, index) for index in range(4)] == [list(calls), [calls[1]], [], []]
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls", "tool_calls", "stop", "stop"]
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 3


def test_calls_inside_reasoning_are_content(server: LiveServer) -> None:
    """Also if the reasoning is never closed, or the answer continues it."""
    call = write_calls(server, ("get_time", {}))
    thought = f"<think>\nPerhaps {call}\n</think>"
    server.engine.script = say(thought, f"{thought}\n\n{call}", f"<think>{call}")
    answer = ask(server, n=3)
    assert [choice.message.content for choice in answer.choices] == [thought, thought, f"<think>{call}"]
    assert [called(answer, index) for index in range(3)] == [[], [("get_time", {})], []]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "tool_calls", "stop"]
    server.engine.script = say(f"and {call}", f"so </think>{call}")
    open_thought = {"role": "assistant", "content": "<think>hm, "}
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = ask(server, n=2, messages=[*QUESTION, open_thought], extra_body=extra)
    assert [called(answer, index) for index in range(2)] == [[], [("get_time", {})]]
    closed = {"role": "assistant", "content": "<think>hm</think>"}
    server.engine.script = say(call)
    answer = ask(server, messages=[*QUESTION, closed], extra_body=extra)
    assert called(answer) == [("get_time", {})]


def test_special_tokens_around_a_call_are_not_content(server: LiveServer) -> None:
    """Llama writes the special token <|python_tag|> before a call."""
    text = write_calls(server, ("get_time", {}))
    server.engine.script = lambda _request, _index: Reply([IM_START, *text.encode(), IM_START, IM_END])
    answer = ask(server)
    assert (answer.choices[0].message.content, called(answer)) == (None, [("get_time", {})])


def test_only_strict_tools_have_a_grammar_with_tool_choice_auto(server: LiveServer) -> None:
    server.engine.script = say("No.")
    for tools, is_strict in ((TOOLS, True), (TOOLS[1:], False)):
        ask(server, tools=tools)
        assert (server.engine.requests[-1].grammar != "") == is_strict


@pytest.mark.parametrize("parallel", [True, False])
def test_tool_choice_required_forces_valid_calls(server: LiveServer, tokenizer_directory: Path, parallel: bool) -> None:
    server.engine.script = follow_grammars(tokenizer_directory)
    answer = ask(server, n=8, seed=3, tool_choice="required", parallel_tool_calls=parallel, max_tokens=600)
    names = []
    for index, choice in enumerate(answer.choices):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        calls = called(answer, index)
        assert len(calls) >= 1
        names += [name for name, _ in calls]
        for name, arguments in calls:
            assert arguments == {} if name == "get_time" else GetWeather(**arguments)
    assert set(names) == {"get_weather", "get_time"}
    assert (len(names) > 8) == parallel


@pytest.mark.parametrize("is_allowed_list", [False, True])
def test_only_the_named_function_is_called(
    server: LiveServer, tokenizer_directory: Path, is_allowed_list: bool
) -> None:
    server.engine.script = follow_grammars(tokenizer_directory)
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    answer = ask(server, n=4, seed=4, tool_choice=allowed if is_allowed_list else named, max_tokens=600)
    for index, choice in enumerate(answer.choices):
        # As in OpenAI's API: a call of the function named by tool_choice finishes with "stop".
        assert choice.finish_reason == ("tool_calls" if is_allowed_list else "stop")
        assert {name for name, _ in called(answer, index)} == {"get_weather"}
        assert is_allowed_list or len(called(answer, index)) == 1


def test_an_answer_is_json_or_calls_when_both_are_requested(server: LiveServer, tokenizer_directory: Path) -> None:
    class Answer(pydantic.BaseModel):
        is_warm: bool

    server.engine.script = follow_grammars(tokenizer_directory)
    fields: dict[str, Any] = {
        "model": "default",
        "messages": QUESTION,
        "tools": TOOLS[:1],
        "seed": 5,
        "max_tokens": 600,
    }
    client = sync_client(server)
    if "parameters" in server.http.get("/tokenizer_info").json()["chat_template"]:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.parse(**fields, response_format=Answer)
        assert refused.value.param == "response_format"
    else:
        parsed = client.chat.completions.parse(**fields, response_format=Answer, n=8).choices
        for choice in parsed:
            assert (choice.message.parsed is None) == bool(choice.message.tool_calls)
        assert len({choice.finish_reason for choice in parsed}) == 2
    # An answer with forced calls has no content to parse.
    (choice,) = client.chat.completions.parse(**fields, response_format=Answer, tool_choice="required").choices
    assert choice.message.parsed is None
    assert choice.message.tool_calls


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@few(1, "choice", ["required", NAMED])
def test_forced_calls_that_are_cut_keep_their_complete_calls_and_have_no_content(
    server: LiveServer, choice: Any
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("get_time", {}), ("get_weather", {"city": "Köln"})]
    if choice is NAMED:
        del calls[0]
    text = write_calls(server, *calls)
    expected = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    ends = [text.index(arguments + "}") + len(arguments) for _, arguments in expected]
    lengths = range(1, len(text) + 1, 1 if IS_NIGHTLY else 7)
    server.engine.script = say(*(text[:length] for length in lengths), finish_reason="length")
    answer = ask(server, tool_choice=choice, n=len(lengths), logprobs=True)
    for length, cut in zip(lengths, answer.choices, strict=True):
        assert (cut.message.content, cut.finish_reason) == (None, "length")
        found: Any = cut.message.tool_calls or []
        num_complete = sum(end <= length for end in ends)
        assert num_complete <= len(found) <= num_complete + 1
        for number, call in enumerate(found):
            name, arguments = expected[number]
            assert call.function.name == name
            if number < num_complete:
                assert call.function.arguments == arguments
            else:
                assert arguments.startswith(call.function.arguments)


@few(1, "choice", ["required", NAMED])
def test_answers_that_follow_the_grammar_of_forced_calls_have_no_content_wherever_they_are_cut(
    server: LiveServer, tokenizer_directory: Path, choice: Any
) -> None:
    num_lengths = 100 if IS_NIGHTLY else 25
    follow = follow_grammars(tokenizer_directory)
    server.engine.script = lambda request, index: follow(replace(request, max_new_tokens=index + 1), index)
    answer = ask(server, tool_choice=choice, n=num_lengths, seed=5)
    assert [cut.message.content for cut in answer.choices] == [None] * num_lengths
    assert {cut.finish_reason for cut in answer.choices[:20]} == {"length"}


def test_a_truncated_call_has_finish_reason_length_and_partial_arguments(server: LiveServer) -> None:
    text = write_calls(server, ("get_weather", {"city": "Köln"}))
    cut = text.index("Köln") + 2
    server.engine.script = say(text[:cut], finish_reason="length")
    (choice,) = ask(server).choices
    (call,) = choice.message.tool_calls or []
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert call.type == "function"
    assert call.function.arguments == '{"city": "Kö'
    server.engine.script = say(text[:8], finish_reason="length")
    (choice,) = ask(server).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", text[:8], None)


def test_text_that_is_not_a_valid_call_stays_content(server: LiveServer) -> None:
    text = "Sure:\n " + write_calls(server, ("unknown", {"city": "Köln"})) + ' {"name": "get_time"} '
    server.engine.script = say(text)
    (choice,) = ask(server).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_a_stop_string_ends_a_call(server: LiveServer) -> None:
    server.engine.script = say(write_calls(server, ("get_weather", {"city": "Köln", "days": 3})))
    (choice,) = ask(server, stop='", "d').choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments == '{"city": "Köln'


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": [], "tool_choice": "auto"}])
def test_without_tools_calls_stay_content_and_the_prompt_shows_no_tools(
    server: LiveServer, fields: dict[str, Any]
) -> None:
    text = write_calls(server, ("get_weather", {"city": "Köln"}))
    server.engine.script = say(text)
    (choice,) = ask(server, **fields).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    with_tools = server.engine.requests[-1].prompt_ids.tolist()
    sync_client(server).chat.completions.create(model="default", messages=QUESTION)
    assert with_tools == server.engine.requests[-1].prompt_ids.tolist()


def test_only_allowed_tools_can_be_called(server: LiveServer) -> None:
    server.engine.script = say(write_calls(server, ("get_weather", {"city": "Köln"}), ("get_time", {})))
    choice: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]},
    }
    answer = ask(server, tool_choice=choice)
    assert called(answer) == [("get_time", {})]
    assert "Köln" in (answer.choices[0].message.content or "")
    prompt = server.engine.requests[-1].prompt_ids.tolist()
    ask(server)
    assert prompt == server.engine.requests[-1].prompt_ids.tolist(), "the prompt has all tools"


def test_parallel_tool_calls_false_returns_one_call(server: LiveServer) -> None:
    server.engine.script = say(write_calls(server, ("get_time", {}), ("get_weather", {"city": "Köln"})))
    assert called(ask(server, parallel_tool_calls=False)) == [("get_time", {})]


def test_pydantic_tools_are_parsed(server: LiveServer) -> None:
    server.engine.script = say(write_calls(server, ("get_weather", {"city": "Köln", "days": 3})))
    client = sync_client(server)
    fields: dict[str, Any] = {"model": "default", "messages": QUESTION, "tools": TOOLS[:1]}
    (call,) = client.chat.completions.parse(**fields).choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Köln", days=3)
    server.engine.delta_size = 3
    with client.chat.completions.stream(**fields) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in events
    assert "tool_calls.function.arguments.done" in events
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Köln", days=3)


def test_an_answer_with_a_call_can_be_sent_back_with_its_result(server: LiveServer, served_model: ServedModel) -> None:
    """The async client sends the answer's message back unchanged, with the tool's result."""
    server.engine.script = say("Let me see.\n" + write_calls(server, ("get_weather", {"city": "Köln", "days": 3})))

    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            first = await client.chat.completions.create(model="default", messages=QUESTION, tools=TOOLS)
            message = first.choices[0].message
            (call,) = message.tool_calls or []
            result = {"role": "tool", "tool_call_id": call.id, "content": "20 °C"}
            messages: list[Any] = [*QUESTION, message, result]
            server.engine.script = say("Yes.")
            second = await client.chat.completions.create(model="default", messages=messages, tools=TOOLS)
            assert second.choices[0].message.content == "Yes."

    asyncio.run(talk())
    text = served_model.tokenizer.decode(server.engine.requests[-1].prompt_ids.tolist())
    positions = [text.index(part) for part in ("Warm there?", '{"city": "Köln", "days": 3}', "20 °C")]
    assert positions == sorted(positions)


def test_tool_call_fragments_are_streamed_before_the_sequence_finishes(server: LiveServer) -> None:
    text = "Hm. " + write_calls(server, ("get_weather", {"city": "Köln"}))
    cut = text.index("öln")
    server.engine.script = lambda _request, _index: Reply([*text[:cut].encode()], finish_reason=None)
    stream = sync_client(server).chat.completions.create(model="default", messages=QUESTION, tools=TOOLS, stream=True)
    content, arguments = "", ""
    for chunk in itertools.islice(stream, 1, None):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for fragment in delta.tool_calls or []:
            assert fragment.function is not None
            arguments += fragment.function.arguments or ""
        if arguments == '{"city": "K':
            break
    assert content == "Hm."
    stream.close()


def test_token_ids_are_sent_while_their_text_is_buffered(server: LiveServer) -> None:
    text = write_calls(server, ("get_time", {}))[:8]
    server.engine.script = lambda _request, _index: Reply([*text.encode()], finish_reason=None)
    extra: dict[str, object] = {"return_token_ids": True}
    stream = sync_client(server).chat.completions.create(
        model="default", messages=QUESTION, tools=TOOLS, stream=True, extra_body=extra
    )
    token_ids: list[int] = []
    for chunk in stream:
        assert not chunk.choices[0].delta.content
        token_ids += getattr(chunk.choices[0], "token_ids", [])
        if len(token_ids) == len(text):
            break
    assert token_ids == [*text.encode()]
    stream.close()


def test_tools_of_an_unknown_format_are_refused(served_model: ServedModel, tmp_path: Path) -> None:
    with tool_server("unknown format", served_model, tmp_path) as live:
        client = sync_client(live)
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="default", messages=QUESTION, tools=TOOLS)
        assert refused.value.param == "tools"
        assert "tool_call_format" in refused.value.message
        client.chat.completions.create(model="default", messages=QUESTION, tools=TOOLS, tool_choice="none")
