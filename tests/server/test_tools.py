"""Tools through the real OpenAI client, whole and streamed, sync and async."""

import asyncio
import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import Choice

from tests.fake_engine import FakeEngine, Reply, Script
from tests.server.conftest import LiveServer, live_server
from tests.server.grammar_engine import follow_grammars
from tests.server.small_tokenizer import IM_END, IM_START
from tests.server.test_call_reader import FRAGMENTS, NAMES
from tests.server.test_openai_client import assert_exactly_openai_shaped, assert_no_extra_fields, sync_client
from tests.server.test_respond import make_request
from tests.server.test_streaming import finished, interleaved, parse
from tests.server.tool_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE, OWN_WAY_TEMPLATE, save_tokenizer_with
from tokasaurus.messages.generation import FinishReason, GenerateRequest
from tokasaurus.messages.lifecycle import EngineLimits
from tokasaurus.server.call_reader import CallRules
from tokasaurus.server.prepare import Prepared
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond import build_chat_completion
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.streaming import ChatStream
from tokasaurus.server.tool_formats import FORMATS, HERMES, LLAMA3, ToolCallFormat, find_tool_support
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


@pytest.fixture(scope="module", params=["hermes", "llama3", "no template"])
def server(request: pytest.FixtureRequest, served_model: ServedModel, tmp_path_factory: Any) -> Iterator[LiveServer]:
    with tool_server(request.param, served_model, tmp_path_factory.mktemp("tokenizer")) as live:
        yield live


def tool_server(template: str, model: ServedModel, directory: Path) -> Any:
    if template != "no template":
        templates = {"hermes": HERMES_TEMPLATE, "llama3": LLAMA3_TEMPLATE, "own way": OWN_WAY_TEMPLATE}
        tokenizer = Tokenizer.load(save_tokenizer_with(templates[template], directory))
        model = dataclasses.replace(model, tokenizer=tokenizer, tools=find_tool_support(tokenizer, None))
    return live_server(model, FakeEngine(limits=LIMITS))


def say(*texts: str, finish_reason: FinishReason = "stop") -> Script:
    """Each sample says its text, a byte to a token."""

    def script(request: GenerateRequest, index: int) -> Reply:
        token_ids = [*texts[index].encode(), *([IM_END] if finish_reason == "stop" else [])]
        logprobs = [-float(place) for place in range(len(token_ids))] if request.want_logprobs else None
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
    """The answer, after a stream of the same has been found to be the same."""
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
    """A choice put together as OpenAI's guide says, its calls without their ids."""
    message: dict[str, Any] = {"content": None, "refusal": None, "role": None, "tool_calls": None}
    message |= {"annotations": None, "audio": None, "function_call": None}
    logprobs: list[Any] | None = None
    finish_reason = None
    ids = set()
    for choice in (choice for chunk in chunks for choice in chunk.choices if choice.index == index):
        assert finish_reason is None, "a chunk after the last"
        finish_reason = choice.finish_reason
        message["role"] = message["role"] or choice.delta.role
        if choice.delta.content is not None:
            message["content"] = (message["content"] or "") + choice.delta.content
        for piece in choice.delta.tool_calls or []:
            calls = message["tool_calls"] = message["tool_calls"] or []
            if piece.id is not None:
                assert piece.index == len(calls)
                assert piece.function is not None
                assert piece.function.arguments == ""
                calls.append({"function": {"arguments": "", "name": piece.function.name}, "type": piece.type})
                ids.add(piece.id)
            assert piece.function is not None
            calls[piece.index]["function"]["arguments"] += piece.function.arguments
        if choice.logprobs is not None:
            logprobs = (logprobs or []) + json.loads(choice.logprobs.model_dump_json())["content"]
    assert len(ids) == len(message["tool_calls"] or [])
    scores = None if logprobs is None else {"content": logprobs, "refusal": None}
    return {"finish_reason": finish_reason, "logprobs": scores, "message": message}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=9), min_size=2, max_size=2),
    st.sampled_from([(), ("x",), ("}}",), ("l_call>\n",), ('": {', "name")]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_a_stream_cut_anywhere_is_the_answer(
    served_model: ServedModel,
    format_: ToolCallFormat,
    fragments: list[list[str]],
    stop: tuple[str, ...],
    want_logprobs: bool,
    parallel: bool,
    seed: int,
) -> None:
    texts = ["".join(some) for some in fragments]
    results = [finished([*f"{text}é".encode(), IM_END], "stop") for text in texts]
    request = make_request(3, stop, want_logprobs=want_logprobs, num_sequences=2)
    prepared = Prepared("chatcmpl-1", [request], calls=CallRules(format_, NAMES, parallel))
    whole = ChatCompletion.model_validate_json(
        orjson.dumps(build_chat_completion(prepared, [results], served_model)), strict=True
    )
    stream = ChatStream(prepared, served_model, StreamOptions())
    groups = interleaved([results], random.Random(seed))
    chunks = [ChatCompletionChunk.model_validate(chunk) for group in groups for chunk in parse(stream.events(group))]
    for choice in whole.choices:
        found, expected = joined(chunks, choice.index), without_ids(choice)
        if want_logprobs and not expected["logprobs"]["content"]:
            found["logprobs"] = expected["logprobs"]  # nothing to be put together
        assert found == expected


def called(answer: ChatCompletion, index: int = 0) -> list[tuple[str, Any]]:
    calls: Any = answer.choices[index].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_an_answer_with_calls(server: LiveServer) -> None:
    calls = ("get_weather", {"city": "Köln"}), ("get_time", {})
    server.engine.script = say(write_calls(server, *calls), "Let me see.\n" + write_calls(server, calls[1]), "No.", "")
    answer = ask(server, n=4, logprobs=True)
    assert [choice.message.content for choice in answer.choices] == [None, "Let me see.", "No.", ""]
    assert [called(answer, index) for index in range(4)] == [list(calls), [calls[1]], [], []]
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls", "tool_calls", "stop", "stop"]
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 3


def test_special_tokens_around_a_call_are_no_text(server: LiveServer) -> None:
    """As Llama writes <|python_tag|> before it."""
    text = write_calls(server, ("get_time", {}))
    server.engine.script = lambda _request, _index: Reply([IM_START, *text.encode(), IM_START, IM_END])
    answer = ask(server)
    assert (answer.choices[0].message.content, called(answer)) == (None, [("get_time", {})])


def test_only_strict_tools_have_a_grammar_where_the_model_chooses(server: LiveServer) -> None:
    server.engine.script = say("No.")
    for tools, is_strict in ((TOOLS, True), (TOOLS[1:], False)):
        ask(server, tools=tools)
        assert (server.engine.requests[-1].grammar != "") == is_strict


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_come_whatever_the_model_would_say(
    server: LiveServer, tokenizer_directory: Path, parallel: bool
) -> None:
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
def test_the_function_that_is_named_is_called(
    server: LiveServer, tokenizer_directory: Path, is_allowed_list: bool
) -> None:
    server.engine.script = follow_grammars(tokenizer_directory)
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    answer = ask(server, n=4, seed=4, tool_choice=allowed if is_allowed_list else named, max_tokens=600)
    for index, choice in enumerate(answer.choices):
        # OpenAI's: no reason to stop is the model's where the client has chosen
        assert choice.finish_reason == ("tool_calls" if is_allowed_list else "stop")
        assert {name for name, _ in called(answer, index)} == {"get_weather"}
        assert is_allowed_list or len(called(answer, index)) == 1


def test_the_answer_is_json_or_calls_where_both_are_asked_for(server: LiveServer, tokenizer_directory: Path) -> None:
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
    # what is forced is no content
    (choice,) = client.chat.completions.parse(**fields, response_format=Answer, tool_choice="required").choices
    assert choice.message.parsed is None
    assert choice.message.tool_calls


def test_a_forced_call_that_is_cut_short_says_so(server: LiveServer, tokenizer_directory: Path) -> None:
    server.engine.script = follow_grammars(tokenizer_directory)
    answer = ask(server, tool_choice="required", seed=1, max_tokens=12)
    assert answer.choices[0].finish_reason == "length"


def test_an_answer_that_is_cut_short_is_no_call_to_be_run(server: LiveServer) -> None:
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


def test_what_is_no_call_stays_content(server: LiveServer) -> None:
    text = "Sure:\n " + write_calls(server, ("unknown", {"city": "Köln"})) + ' {"name": "get_time"} '
    server.engine.script = say(text)
    (choice,) = ask(server).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_a_stop_string_ends_a_call_too(server: LiveServer) -> None:
    server.engine.script = say(write_calls(server, ("get_weather", {"city": "Köln", "days": 3})))
    (choice,) = ask(server, stop='", "d').choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments == '{"city": "Köln'


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": [], "tool_choice": "auto"}])
def test_without_tools_nothing_is_a_call_and_the_prompt_has_none(server: LiveServer, fields: dict[str, Any]) -> None:
    text = write_calls(server, ("get_weather", {"city": "Köln"}))
    server.engine.script = say(text)
    (choice,) = ask(server, **fields).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    with_tools = server.engine.requests[-1].prompt_ids.tolist()
    sync_client(server).chat.completions.create(model="default", messages=QUESTION)
    assert with_tools == server.engine.requests[-1].prompt_ids.tolist()


def test_allowed_tools_are_those_that_can_be_called(server: LiveServer) -> None:
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


def test_one_call_where_they_may_not_be_parallel(server: LiveServer) -> None:
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


def test_a_conversation_goes_on_with_what_the_answer_was(server: LiveServer, served_model: ServedModel) -> None:
    """The async client's messages are sent back as they came, with the results."""
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


def test_deltas_come_while_the_engine_is_at_work(server: LiveServer) -> None:
    text = "Hm. " + write_calls(server, ("get_weather", {"city": "Köln"}))
    cut = text.index("öln")
    server.engine.script = lambda _request, _index: Reply([*text[:cut].encode()], finish_reason=None)
    stream = sync_client(server).chat.completions.create(model="default", messages=QUESTION, tools=TOOLS, stream=True)
    content, arguments = "", ""
    for chunk in itertools.islice(stream, 1, None):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for piece in delta.tool_calls or []:
            assert piece.function is not None
            arguments += piece.function.arguments or ""
        if arguments == '{"city": "K':
            break
    assert content == "Hm."
    stream.close()


def test_token_ids_come_though_their_text_is_held(server: LiveServer) -> None:
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
    with tool_server("own way", served_model, tmp_path) as live:
        client = sync_client(live)
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="default", messages=QUESTION, tools=TOOLS)
        assert refused.value.param == "tools"
        assert "tool_call_format" in refused.value.message
        client.chat.completions.create(model="default", messages=QUESTION, tools=TOOLS, tool_choice="none")
