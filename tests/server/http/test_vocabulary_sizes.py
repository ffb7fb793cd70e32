"""A model whose vocabulary is smaller or larger than its tokenizer's, with every feature that has to do with ids."""

from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from tests.helpers.small_tokenizer import IM_END, IM_START, VOCAB_SIZE
from tests.server.helpers.fake_engine import FakeEngine, Reply
from tests.server.helpers.live_server import live_server
from tests.server.helpers.openai_client import sync_client
from tokasaurus.messages.generation import GenerateRequest, TopLogprobs
from tokasaurus.server.served_model import ServedModel

BEYOND = VOCAB_SIZE + 20
HELLO = 259


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, trust_env=False, timeout=60)


@pytest.mark.parametrize(
    ("path", "body", "param", "token"),
    [
        ("/v1/completions", {"prompt": "a<|im_end|>"}, "prompt", f"'<|im_end|>' with id {IM_END}"),
        ("/v1/completions", {"prompt": [[97], [97, IM_END]]}, "prompt", f"'<|im_end|>' with id {IM_END}"),
        ("/v1/completions", {"prompt": [BEYOND]}, "prompt", f"token id {BEYOND}"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "messages", f"id {IM_END}"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {IM_START: 1}}, "logit_bias", f"id {IM_START}"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [IM_END]}, "stop_token_ids", f"id {IM_END}"),
    ],
)
def test_a_token_that_the_model_lacks_is_refused_by_name(
    served_model: ServedModel, path: str, body: dict[str, Any], param: str, token: str
) -> None:
    with live_server(replace(served_model, vocab_size=IM_START), FakeEngine()) as server:
        answer = post(server.url, path, model="default", **body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert token in error["message"]
        assert f"valid ids are 0 to {IM_START - 1}" in error["message"]
        # The text itself can be tokenized, and its ids decoded.
        ids = post(server.url, "/tokenize", prompt="a<|im_end|>").json()["tokens"]
        assert ids == [97, IM_END]
        assert post(server.url, "/detokenize", tokens=ids).json() == {"prompt": "a<|im_end|>"}
        good = post(server.url, "/v1/completions", model="default", prompt="hello", logit_bias={97: 1}, stop="x")
        assert good.json()["choices"][0]["text"] == "hello"


def sampled_beyond(request: GenerateRequest, _index: int) -> Reply:
    token_ids = [BEYOND, HELLO, BEYOND, 0xC3, BEYOND, 0xA9, 97]
    top = TopLogprobs(
        np.array([[token_id, BEYOND + 1] for token_id in token_ids], np.int32),
        np.tile(np.array([-0.5, -1.0], np.float32), (len(token_ids), 1)),
    )
    return Reply(token_ids, [-0.5] * len(token_ids) if request.want_logprobs else None, "length", top=top)


def test_ids_beyond_the_tokenizers_have_no_text(served_model: ServedModel) -> None:
    engine = FakeEngine()
    engine.script = sampled_beyond
    with live_server(replace(served_model, vocab_size=VOCAB_SIZE + 100), engine) as server:
        body: dict[str, Any] = {"model": "default", "logprobs": 2, "return_token_ids": True, "max_tokens": 7}
        body |= {"prompt": [97, BEYOND], "logit_bias": {BEYOND: 1.5}, "stop_token_ids": [BEYOND + 5], "echo": True}
        answer = post(server.url, "/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["text"] == "ahelloéa"
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == 2 + 7
        assert choice["logprobs"]["tokens"][:5] == ["a", "", "", "hello", ""]
        assert post(server.url, "/v1/completions", **body, stop="é").json()["choices"][0]["text"] == "ahello"
        chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
        answer = post(server.url, "/v1/chat/completions", model="default", **chat, max_tokens=7)
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] == "helloéa"
        content = choice["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in content) == "helloéa".encode()
        assert [entry["bytes"] for entry in content if entry["token"] == ""] == [[]] * 3
        assert post(server.url, "/detokenize", tokens=[BEYOND, HELLO]).json() == {"prompt": "hello"}
        stream = sync_client(server).completions.create(model="default", prompt="a", max_tokens=7, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "helloéa"
