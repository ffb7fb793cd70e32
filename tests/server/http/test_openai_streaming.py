"""Streams read by the real OpenAI client, sync and async, compared with its unstreamed answers."""

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tests.server.helpers.fake_engine import FakeEngine, Reply
from tests.server.helpers.live_server import LiveServer, live_server, wait_until_clean
from tests.server.helpers.openai_client import assert_no_extra_fields, say_hello, sync_client
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.served_model import ServedModel

HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def never_finish(_request: GenerateRequest, index: int) -> Reply:
    """Two tokens of a sequence that never finishes."""
    return Reply([259, ord("0") + index], [-0.5, -0.5], finish_reason=None)


def events_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[str]:
    """The data of each server-sent event."""
    response = http.post(path, json={"model": "default", "stream": True, **body})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def joined_texts(chunks: Iterable[Completion]) -> dict[int, tuple[str, str]]:
    """Text and finish reason by index."""
    joined: dict[int, tuple[str, str]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text, finish_reason = joined.get(choice.index, ("", None))
            assert finish_reason is None
            joined[choice.index] = (text + choice.text, choice.finish_reason)
    return joined


@pytest.mark.parametrize("stop", [None, ["lo €", "1"]])
def test_joined_chunks_of_a_completion_stream_equal_the_unstreamed_answer(
    server: LiveServer, stop: list[str] | None
) -> None:
    server.engine.script = say_hello
    client = sync_client(server)
    fields: dict[str, Any] = {"model": "default", "prompt": ["abc", "de"], "n": 2, "stop": stop}
    unstreamed = client.completions.create(**fields)
    *chunks, last = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert joined_texts(chunks) == {choice.index: (choice.text, choice.finish_reason) for choice in unstreamed.choices}
    assert (last.choices, last.usage) == ([], unstreamed.usage)
    for chunk in chunks:
        assert (chunk.object, chunk.model, chunk.id) == ("text_completion", "org/small", last.id)
        assert len(chunk.choices) == 1
        assert chunk.usage is None
    assert [request.is_streamed for request in server.engine.requests] == [False, False, True, True]
    wait_until_clean(server)
    assert server.engine.cancelled == []


def test_chat_stream_collected_by_the_client_equals_the_unstreamed_answer(server: LiveServer) -> None:
    server.engine.script = say_hello
    client = sync_client(server)
    fields: dict[str, Any] = {"model": "default", "messages": HELLO, "n": 3, "logprobs": True}
    unstreamed = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        collected = stream.get_final_completion()
    assert kinds.count("content.done") == 3
    for choice, expected in zip(collected.choices, unstreamed.choices, strict=True):
        assert choice.index == expected.index
        assert choice.finish_reason == expected.finish_reason
        assert choice.message.content == expected.message.content
        assert choice.message.role == "assistant"
        assert choice.logprobs == expected.logprobs
    assert collected.usage == unstreamed.usage


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"continuous_usage_stats": True}])
@pytest.mark.parametrize("logprobs", [False, True])
def test_every_event_has_exactly_openais_fields(server: LiveServer, options: dict[str, bool], logprobs: bool) -> None:
    server.engine.script = say_hello
    chat = {"messages": HELLO, "logprobs": logprobs, "stream_options": options}
    completion = {"prompt": "a", "logprobs": 0 if logprobs else None, "stream_options": options}
    *events, done = events_of(server.http, "/v1/chat/completions", chat)
    assert done == "[DONE]"
    for event in events:
        assert_no_extra_fields(ChatCompletionChunk.model_validate_json(event, strict=True))
    *events, done = events_of(server.http, "/v1/completions", completion)
    assert done == "[DONE]"
    for event in events:
        # The client's type for chunks is the one for whole answers, where finish_reason cannot be null.
        assert_no_extra_fields(
            Completion.model_validate_json(event.replace('"finish_reason":null', '"finish_reason":"stop"'))
        )


def test_each_of_100_concurrent_streams_gets_its_own_text(shared_server: LiveServer) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": f"hello {number}"}], max_tokens=64, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(100)))

    # The engine echoes the prompt; its special tokens have no text.
    assert asyncio.run(main()) == [f"user\nhello {number}\nassistant\n" for number in range(100)]
    wait_until_clean(shared_server)


def test_text_is_streamed_before_the_sequences_finish(server: LiveServer) -> None:
    server.engine.script = never_finish
    stream = iter(sync_client(server).completions.create(model="default", prompt="a", n=2, stream=True))
    texts = {0: "", 1: ""}
    while texts != {0: "hello0", 1: "hello1"}:
        choice = next(stream).choices[0]
        texts[choice.index] += choice.text
        assert choice.finish_reason is None
    assert server.client.num_pending_requests == 1


def test_disconnecting_during_a_stream_cancels_its_requests(server: LiveServer) -> None:
    server.engine.script = never_finish
    stream = sync_client(server).completions.create(model="default", prompt=["a", "b"], stream=True)
    next(iter(stream))
    assert server.engine.cancelled == []
    stream.close()
    server.engine.wait_until(lambda engine: len(engine.cancelled) == 2)
    assert set(server.engine.cancelled) == {request.request_id for request in server.engine.requests}
    wait_until_clean(server)


def test_disconnecting_before_the_first_event_cancels_the_request(server: LiveServer) -> None:
    server.engine.script = lambda _request, _index: None
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=3, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="default", prompt="ok", stream=True)
    server.engine.wait_until(lambda engine: len(engine.cancelled) == 1)
    wait_until_clean(server)


def test_a_failure_during_a_stream_is_sent_as_an_event_and_raises_in_the_client(server: LiveServer) -> None:
    # Six tokens with three logprobs: the server fails at the fourth token.
    server.engine.script = lambda _request, _index: Reply(list(b"abcdef"), [-1.0] * 3)
    read = threading.Semaphore(0)
    server.engine.before_update = lambda: read.acquire(timeout=60)  # else chunks that come together are one
    stream = sync_client(server).completions.create(model="default", prompt="a", logprobs=0, stream=True)
    texts: list[str] = []

    def read_all() -> None:
        for chunk in stream:
            texts.append(chunk.choices[0].text)
            read.release()

    with pytest.raises(openai.APIError) as failed:
        read_all()
    read.release(10)
    assert texts == ["a", "b", "c"]
    assert (failed.value.type, failed.value.code) == ("server_error", None)
    wait_until_clean(server)
    server.engine.delta_size = 10
    response = server.http.post(
        "/v1/completions", json={"model": "default", "prompt": "a", "logprobs": 0, "stream": True}
    )
    assert response.status_code == 500, "the failure precedes the first event"
    assert response.json()["error"]["type"] == "server_error"


def test_a_stream_cut_off_by_server_shutdown_ends_with_an_error_event(served_model: ServedModel) -> None:
    engine = FakeEngine(script=never_finish)
    with httpx.Client(timeout=20) as http:
        with live_server(served_model, engine) as server:
            body = {"model": "default", "prompt": "a", "stream": True}
            response = http.send(http.build_request("POST", f"{server.url}/v1/completions", json=body), stream=True)
            lines = response.iter_lines()
            assert "hello" in next(lines)
        rest = [line for line in lines if line]
    assert "server_stopping" in rest.pop()
    assert all('"error"' not in line and "[DONE]" not in line for line in rest)
    assert server.client.num_pending_requests == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"every": 3}}, "stream_options.every"),
        ({"stream": True, "temperature": -1}, "temperature"),
        ({"stream": True, "max_tokens": 100_000}, "max_tokens"),
    ],
)
def test_an_invalid_stream_request_is_a_400_naming_the_field(
    shared_server: LiveServer, fields: dict[str, Any], param: str
) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})):
        response = shared_server.http.post(path, json={"model": "default", **body, **fields})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
