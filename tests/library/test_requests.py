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

TEMPLATE = "{{ messages[0].content }}{% if enable_thinking %}<think>\n{% endif %}"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = save_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    path: Path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    with live_server(make_served_model(directory), FakeEngine()) as server, Client(server.url) as client:
        yield client


@pytest.mark.parametrize(
    ("text", "opened", "reasoning"),
    [
        ("So it is.</think>Yes", True, "So it is."),
        ("So it is.</think>Yes", False, None),
        ("The mark </think> ends it, as <think> begins it", False, None),
        ("<think>So.</think>Yes", False, "So."),
        ("<think>So.</think>Yes", True, "So."),
        ("\n<think>cut", False, "cut"),
        ("cut", True, "cut"),
        ("[THINK]a [/THINK]b", False, "a"),
        ("Yes", False, None),
    ],
)
def test_reasoning_counts_where_the_text_or_the_template_begins_it(
    client: Client, text: str, opened: bool, reasoning: str | None
) -> None:
    sampling = Sampling(max_tokens=len(text))
    messages = [{"role": "user", "content": text}]
    (result,) = client.chat([messages], sampling, chat_template_kwargs={"enable_thinking": opened})
    assert (result.text, result.samples[0].reasoning) == (text, reasoning)
    if not opened:
        assert client.generate([text], sampling)[0].samples[0].reasoning == reasoning
