"""Fields that change prompts and names of answers: live, streamed, in bulk."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.small_model import make_served_model
from tests.helpers.small_tokenizer import IM_END, IM_START, save_small_tokenizer
from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, check_refused, minimal_body
from tests.server.helpers.fake_engine import LIMITS, FakeEngine, Reply
from tests.server.helpers.live_server import LiveServer, live_server

TEXT = "hello world, how are you?"
CONTEXT = LIMITS.max_tokens_per_sequence


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Its tokenizer adds a token before each text."""
    directory = save_small_tokenizer(tmp_path_factory.mktemp("with bos"))
    content = json.loads((directory / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [IM_START], "tokens": ["<|im_start|>"]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with live_server(make_served_model(directory), FakeEngine()) as server:
        yield server


def ask(server: LiveServer, route: str, **fields: Any) -> tuple[dict[str, Any], list[int]]:
    """The answer, and the prompt that the engine had."""
    response = server.http.post(route, json=minimal_body(route) | fields)
    assert response.status_code == 200, response.text
    return response.json(), server.engine.requests[-1].prompt_ids.tolist()


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_the_last_tokens_of_a_prompt_are_kept(server: LiveServer, route: str) -> None:
    _, whole = ask(server, route)
    for most in (1, 3, len(whole), len(whole) + 5, float(3)):
        answer, kept = ask(server, route, truncate_prompt_tokens=most)
        assert kept == whole[-int(most) :]
        assert answer["usage"]["prompt_tokens"] == len(kept)


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_minus_one_leaves_room_for_the_answer(server: LiveServer, route: str) -> None:
    long = "hello world " * 300
    fields = {"prompt": long} if route == COMPLETIONS else {"messages": [{"role": "user", "content": long}]}
    response = server.http.post(route, json=minimal_body(route) | fields)
    assert assert_openai_error(response.content)["code"] == "context_length_exceeded"
    for max_tokens in (2, 100):
        _, kept = ask(server, route, **fields, truncate_prompt_tokens=-1, max_tokens=max_tokens)
        assert len(kept) == CONTEXT - max_tokens
    _, kept = ask(server, route, **fields, truncate_prompt_tokens=-1, max_tokens=None)
    assert len(kept) == CONTEXT - (16 if route == COMPLETIONS else 1)
    _, short = ask(server, route, truncate_prompt_tokens=-1)
    assert short == ask(server, route)[1]


@pytest.mark.parametrize(("route", "most"), [("/v1/messages", "max_tokens"), ("/v1/responses", "max_output_tokens")])
def test_minus_one_leaves_room_for_the_answer_of_other_forms_of_chat(server: LiveServer, route: str, most: str) -> None:
    question = [{"role": "user", "content": "hello world " * 300}]
    fields = {"messages": question} if route == "/v1/messages" else {"input": question}
    body = {"model": "default", "truncate_prompt_tokens": -1, most: 100} | fields
    response = server.http.post(route, json=body)
    assert response.status_code == 200, response.text
    request = server.engine.requests[-1]
    assert (len(request.prompt_ids), request.max_new_tokens) == (CONTEXT - 100, 100)


def test_a_truncated_prompt_is_echoed_as_it_is_left(server: LiveServer) -> None:
    body = {"prompt": TEXT, "truncate_prompt_tokens": 6, "echo": True, "logprobs": 0, "max_tokens": 1}
    answer, kept = ask(server, COMPLETIONS, **body)
    (choice,) = answer["choices"]
    assert len(kept) == 6
    assert choice["text"].startswith(TEXT[-6:])
    assert len(choice["logprobs"]["tokens"]) == 7


@pytest.mark.parametrize("value", [0, -2, 1.5, True, "3"])
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_other_numbers_of_tokens_are_refused(server: LiveServer, route: str, value: object) -> None:
    check_refused(server, route, minimal_body(route) | {"truncate_prompt_tokens": value}, "truncate_prompt_tokens")


def test_the_tokenizers_tokens_are_added_as_asked(server: LiveServer) -> None:
    plain = ask(server, COMPLETIONS, add_special_tokens=False)[1]
    assert plain == [259]  # "hello"
    assert ask(server, COMPLETIONS)[1] == ask(server, COMPLETIONS, add_special_tokens=True)[1] == [IM_START, *plain]
    assert ask(server, COMPLETIONS, prompt=[5, 6], add_special_tokens=True)[1] == [5, 6]
    chat = ask(server, CHAT)[1]
    assert ask(server, CHAT, add_special_tokens=False)[1] == chat
    assert ask(server, CHAT, add_special_tokens=True)[1] == [IM_START, *chat]


@pytest.mark.parametrize(("route", "prefix"), [(COMPLETIONS, "cmpl"), (CHAT, "chatcmpl")])
def test_a_client_names_its_answer(server: LiveServer, route: str, prefix: str) -> None:
    for _ in range(2):  # the engine's own ids stay unique
        assert ask(server, route, request_id="mine")[0]["id"] == f"{prefix}-mine"
        assert ask(server, route, rid="mine")[0]["id"] == "mine"
    stream = server.http.post(route, json=minimal_body(route) | {"request_id": "mine", "stream": True})
    chunks = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    assert {chunk["id"] for chunk in chunks} == {f"{prefix}-mine"}
    lines = [
        {"custom_id": str(number), "url": route, "body": minimal_body(route) | {"request_id": "mine"}}
        for number in range(8)
    ]
    results = server.http.post("/v1/bulk", content="\n".join(map(json.dumps, lines))).text.splitlines()
    assert {json.loads(line)["response"]["body"]["id"] for line in results} == {f"{prefix}-mine"}
    for wrong in ("", "a\n", "é", "x" * 201, 5):
        check_refused(server, route, minimal_body(route) | {"request_id": wrong}, "request_id")
    check_refused(server, route, minimal_body(route) | {"request_id": "a", "rid": "b"}, "rid")


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_texts_have_special_tokens_and_stops_if_asked(server: LiveServer, route: str) -> None:
    server.engine.script = lambda _request, _index: Reply([259, IM_START, *b" w", IM_END], None, "stop")
    try:
        for fields, expected in (
            ({}, "hello w"),
            ({"skip_special_tokens": False}, "hello<|im_start|> w"),
            ({"include_stop_str_in_output": True}, "hello w"),
            ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "hello<|im_start|> w<|im_end|>"),
            ({"skip_special_tokens": False, "no_stop_trim": True}, "hello<|im_start|> w<|im_end|>"),
            ({"stop": "o w"}, "hell"),
            ({"stop": "o w", "no_stop_trim": True}, "hello w"),
            ({"stop": "im_start", "skip_special_tokens": False}, "hello<|"),
            ({"stop": "im_start", "skip_special_tokens": False, "no_stop_trim": True}, "hello<|im_start"),
        ):
            for streams in (False, True):
                response = server.http.post(route, json=minimal_body(route) | fields | {"stream": streams})
                assert text_of(response.text, route, streams) == expected, (fields, streams)
    finally:
        server.engine.script = FakeEngine().script


def text_of(answer: str, route: str, is_stream: bool) -> str:
    if not is_stream:
        (choice,) = json.loads(answer)["choices"]
        return str(choice["text"] if route == COMPLETIONS else choice["message"]["content"])
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] if route == COMPLETIONS else choice["delta"].get("content", "") for choice in choices)
