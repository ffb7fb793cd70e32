"""Anthropic's client on /v1/messages."""

from typing import Any, Literal

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


def test_a_last_message_of_the_assistant_is_continued(client: Any) -> None:
    greedy = {"model": "default", "extra_body": {"temperature": 0}}
    whole = client.messages.create(messages=QUESTION, max_tokens=24, **greedy).content[0].text
    begun = " ".join(whole.split(" ")[:4])
    history = [*QUESTION, {"role": "assistant", "content": begun}]
    rest = client.messages.create(messages=history, max_tokens=8, **greedy).content[0].text
    assert rest
    assert whole.startswith(begun + rest)
    counts = [client.messages.count_tokens(model="default", messages=some).input_tokens for some in (QUESTION, history)]
    assert counts[0] < counts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_goes_on_without_a_thread(anthropic: Any, client: Any, stream: bool) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def look_up(word: Literal["whale", "seal"]) -> str:
        """Looks a word up.

        Args:
            word: The word.
        """
        asked.append(word)
        return "Krill."

    runner = client.beta.messages.tool_runner(
        tools=[look_up],
        messages=QUESTION,
        tool_choice={"type": "tool", "name": "look_up"},
        max_iterations=2,
        stream=stream,
        **GREEDY | {"max_tokens": 60},
    )
    messages = [message.get_final_message() if stream else message for message in runner]
    assert [message.stop_reason for message in messages] == ["tool_use"] * len(messages)
    assert len(messages) == 2
    assert asked


def test_every_field_of_the_client_is_known(anthropic: Any, client: Any) -> None:
    from anthropic.types import message_count_tokens_params, message_create_params
    from anthropic.types.beta import message_create_params as beta_params

    in_headers = {"betas", "user_profile_id", "workspace_id"}
    bases = (
        message_create_params.MessageCreateParamsBase,
        beta_params.MessageCreateParamsBase,
        message_count_tokens_params.MessageCountTokensParams,
    )
    refusals: dict[str, str] = {}
    for name in {name for base in bases for name in base.__annotations__} - in_headers:
        try:
            client.messages.create(messages=QUESTION, **GREEDY, extra_body={name: {"no": "such value"}})
        except anthropic.BadRequestError as error:
            refusals[name] = error.message
    assert len(refusals) > 10
    unknown = {name: f"unknown field {name!r}" for name in refusals}
    assert [name for name, said in refusals.items() if name not in said or unknown[name] in said] == []


def test_tools_without_a_schema_are_called(client: Any) -> None:
    for tool in ({"type": "bash_20250124", "name": "bash"}, {"type": "memory_20250818", "name": "memory"}):
        choice = {"type": "tool", "name": tool["name"]}
        message = client.messages.create(
            model="default", messages=QUESTION, max_tokens=200, tools=[tool], tool_choice=choice
        )
        assert [block.type for block in message.content] == ["tool_use"]


def test_documents_and_search_results_are_read(client: Any) -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Whales eat krill."}}
    found = {"type": "search_result", "source": "x", "title": "t", "content": [{"type": "text", "text": "Krill."}]}
    question = {"type": "text", "text": "What do whales eat?"}
    message = client.messages.create(messages=[{"role": "user", "content": [document, found, question]}], **GREEDY)
    assert message.content[0].text
