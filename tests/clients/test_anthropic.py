"""Anthropic's client on /v1/messages."""

from typing import Any

import pytest

from tests.clients.conftest import PlainPost

QUESTION = [{"role": "user", "content": "What do whales eat?"}]
TOOL = {
    "name": "look_up",
    "description": "Looks a word up.",
    "input_schema": {
        "type": "object",
        "properties": {"word": {"enum": ["whale", "seal"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
}
GREEDY = {"model": "default", "max_tokens": 12}


@pytest.fixture(scope="module")
def anthropic() -> Any:
    return pytest.importorskip("anthropic", reason="anthropic is not installed: `make test-clients` has it")


@pytest.fixture
def client(anthropic: Any, base_url: str) -> Any:
    return anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0)


def test_a_message_and_its_stream_equal_the_chat(client: Any, plain_post: PlainPost) -> None:
    expected = plain_post("chat/completions", {"messages": QUESTION, "max_tokens": 12, "temperature": 0})
    greedy = {**GREEDY, "extra_body": {"temperature": 0}}
    message = client.messages.create(messages=QUESTION, **greedy)
    assert message.content[0].text == expected["choices"][0]["message"]["content"]
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == expected["usage"]["completion_tokens"]
    with client.messages.stream(messages=QUESTION, **greedy) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == message.content[0].text
    assert final.usage.output_tokens == message.usage.output_tokens
    counted = client.messages.count_tokens(model="default", messages=QUESTION)
    assert counted.input_tokens == expected["usage"]["prompt_tokens"]


def test_a_tool_is_called_and_its_result_can_be_sent_back(client: Any) -> None:
    fields: dict[str, Any] = {
        "model": "default",
        "max_tokens": 80,
        "tools": [TOOL],
        "extra_body": {"temperature": 0},
        "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
    }
    choice = {"type": "tool", "name": "look_up"}
    with client.messages.stream(messages=QUESTION, tool_choice=choice, **fields) as stream:
        final = stream.get_final_message()
    (call,) = final.content
    assert (call.type, call.name, list(call.input)) == ("tool_use", "look_up", ["word"])
    assert final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Krill."}]}
    history = [*QUESTION, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=history, tool_choice={"type": "none"}, **fields)
    assert second.content[0].text


def test_errors_are_the_clients_own(anthropic: Any, client: Any) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://192.0.2.1/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(messages=[{"role": "user", "content": [image]}], **GREEDY)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(messages=QUESTION, model="other", max_tokens=5)
