"""bad_words and allowed_token_ids → the tokens that are forbidden, by vLLM's rule."""

from typing import Any

import pytest

from tests.helpers.small_tokenizer import VOCAB_SIZE
from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, check_refused, minimal_body
from tests.server.helpers.live_server import LiveServer
from tokasaurus.messages.generation import TokenFilter
from tokasaurus.server.prepare.completion import MAX_ALLOWED_TOKENS_OF_PROMPTS

# In the small tokenizer "hello" and " wo" are tokens, and other texts are bytes.
HELLO = 259


def filter_of(server: LiveServer, route: str, **fields: Any) -> TokenFilter | None:
    response = server.http.post(route, json=minimal_body(route) | fields)
    assert response.status_code == 200, response.text
    return server.engine.requests[-1].token_filter


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_words_are_forbidden_as_they_begin_a_text_and_after_a_space(shared_server: LiveServer, route: str) -> None:
    encode = shared_server.http.post
    assert filter_of(shared_server, route) is None
    assert filter_of(shared_server, route, bad_words=[]) is None
    found = filter_of(shared_server, route, bad_words=["hello", "  lo", "wo"])
    assert found is not None
    expected = []
    for word in ("hello", "lo", "wo"):
        plain, spaced = (
            tuple(encode("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"])
            for text in (word, f" {word}")
        )
        expected.append(plain)
        # " wo" is one token and "wo" two, so only the latter is forbidden; vLLM's rule
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            expected.append(spaced)
    assert found == TokenFilter.of_ids(VOCAB_SIZE, None, tuple(expected))
    assert found.bad_sequences[0] == (HELLO,)


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_allowed_ids_arrive_once_each(shared_server: LiveServer, route: str) -> None:
    found = filter_of(shared_server, route, allowed_token_ids=[7, 5.0, 7])
    assert found == TokenFilter.of_ids(VOCAB_SIZE, (7, 5))
    found = filter_of(shared_server, route, allowed_token_ids=[7, HELLO], bad_words=["hello"])
    assert found == TokenFilter.of_ids(VOCAB_SIZE, (7, HELLO), ((HELLO,),))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["5"]}, "allowed_token_ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids"),
        ({"bad_words": "hello"}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [" \n"]}, "bad_words"),
        ({"bad_words": ["a"] * 257}, "bad_words"),
        ({"bad_words": ["a" * 257]}, "bad_words"),
        ({"bad_words": ["hello"], "allowed_token_ids": [HELLO]}, "bad_words"),
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_wrong_values_are_refused(shared_server: LiveServer, route: str, fields: dict[str, Any], param: str) -> None:
    check_refused(shared_server, route, minimal_body(route) | fields, param)


def test_many_prompts_with_many_allowed_ids_are_refused(shared_server: LiveServer) -> None:
    ids = list(range(VOCAB_SIZE))
    most = MAX_ALLOWED_TOKENS_OF_PROMPTS // len(ids)
    body = minimal_body(COMPLETIONS) | {"allowed_token_ids": ids, "prompt": ["a"] * (most + 1)}
    check_refused(shared_server, COMPLETIONS, body, "allowed_token_ids")
    assert filter_of(shared_server, COMPLETIONS, allowed_token_ids=ids, prompt=["a"] * 4) is not None
