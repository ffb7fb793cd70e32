"""What a client makes of answers, against a real HTTP server whose engine echoes the prompt's first tokens."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.small_model import make_served_model
from tests.helpers.small_tokenizer import save_small_tokenizer
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import live_server
from tokasaurus import Client, Sampling
from tokasaurus.library.requests import RequestFormat

TEMPLATE = "{{ messages[0].content }}{% if enable_thinking %}<think>\n{% endif %}"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = save_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    path: Path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    with live_server(make_served_model(directory), FakeEngine()) as server, Client(server.url) as client:
        yield client


def test_integers_beyond_64_bits_are_sent_and_read_as_they_are(client: Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": 10**30, "enum": [-(2**64)]}}}
    options = {"chat_template_kwargs": {"number": 2**64}}
    schema = {"type": "object", "properties": {"n": {"const": 10**30}}}
    request_format = RequestFormat("m", tools=[tool], options=options, schema=schema)
    messages = [{"role": "user", "content": "a", "more": 10**30}]
    body = json.loads(request_format.line(0, messages).body)
    assert (body["messages"], body["tools"]) == (messages, [tool])
    assert body["chat_template_kwargs"] == options["chat_template_kwargs"]
    assert body["response_format"]["json_schema"]["schema"] == schema
    text = '{"n": 1000000000000000000000000000000}'
    assert client.chat([[{"role": "user", "content": text}]], schema={"type": "object"})[0].parsed == {"n": 10**30}


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "rest"),
    [
        ("So it is.</think>Yes", True, "So it is.", "Yes"),
        ("So it is.</think>Yes", False, None, "So it is.</think>Yes"),
        ("The mark </think> ends it", False, None, "The mark </think> ends it"),
        ("<think>So.</think>Yes", False, "So.", "Yes"),
        ("<think>So.</think>Yes", True, "So.", "Yes"),
        ("\n<think>cut", False, "cut", ""),
        ("cut", True, "cut", ""),
        ("Yes", False, None, "Yes"),
    ],
)
def test_reasoning_counts_where_the_text_or_the_template_begins_it(
    client: Client, text: str, opened: bool, reasoning: str | None, rest: str
) -> None:
    """In a chat it is split off the text. A prompt that is a text has no template, and its completion is whole."""
    sampling = Sampling(max_tokens=len(text))
    messages = [{"role": "user", "content": text}]
    (result,) = client.chat([messages], sampling, chat_template_kwargs={"enable_thinking": opened})
    assert (result.text, result.samples[0].reasoning) == (rest, reasoning)
    if not opened:
        (result,) = client.generate([text], sampling)
        assert (result.text, result.samples[0].reasoning) == (text, reasoning)


def test_reasoning_in_marks_that_the_template_lacks_is_found_in_completions_alone(client: Client) -> None:
    text = "[THINK]a [/THINK]b"
    sampling = Sampling(max_tokens=len(text))
    (chat,) = client.chat([[{"role": "user", "content": text}]], sampling)
    (completion,) = client.generate([text], sampling)
    assert (chat.text, chat.samples[0].reasoning) == (text, None)
    assert (completion.text, completion.samples[0].reasoning) == (text, "a")
