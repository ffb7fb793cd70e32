"""Grammars over texts that spell added tokens, over HTTP: the answer has exactly these texts, whole and streamed."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as BaseTokenizer

from tests.helpers.small_tokenizer import save_small_tokenizer
from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, minimal_body
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.grammar_script import follow_grammars
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.tokenizer import Tokenizer

# The first two exist in the small tokenizer already, as special tokens; <|im_end|> is its eos.
TEXTS = ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "café", "plain", "[INST]"]
SPECIAL = {"<|im_end|>", "<|im_start|>", "<tool_call>", "[INST]"}
ANY_TEXT = "|".join(map(re.escape, TEXTS))
IN_LARK = ANY_TEXT.replace("/", r"\/")
ALL_TEXTS = "".join(TEXTS)
LIMITS = EngineLimits(num_kv_blocks=512, page_size=16, max_tokens_per_sequence=4096)


def holds(schema: dict[str, Any]) -> Callable[[str], bool]:
    return lambda text: jsonschema_rs.is_valid(schema, json.loads(text))


def object_of(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


CONST = object_of(a={"const": ALL_TEXTS}, b={"enum": TEXTS})
NAMES = object_of(**{text: {"type": "null"} for text in TEXTS})
PATTERN = object_of(a={"type": "string", "pattern": f"^x?({ANY_TEXT})({ANY_TEXT})y$"})
FIELDS: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"guided_choice": TEXTS}, TEXTS.__contains__),
    *(({"guided_choice": [text]}, text.__eq__) for text in TEXTS),
    *(({"guided_regex": f"a{re.escape(text)}b"}, f"a{text}b".__eq__) for text in TEXTS),
    ({"guided_regex": "<think>a</think>b"}, "<think>a</think>b".__eq__),
    ({"guided_regex": f"({ANY_TEXT}){{5}}"}, re.compile(f"({ANY_TEXT}){{5}}").fullmatch),
    ({"guided_json": CONST}, holds(CONST)),
    ({"guided_json": NAMES}, holds(NAMES)),
    ({"guided_json": PATTERN}, holds(PATTERN)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": TEXTS}}}},
        lambda text: json.loads(text) in TEXTS,
    ),
    (
        {"guided_grammar": f'start: "{ALL_TEXTS}" /{IN_LARK}/'},
        re.compile(f"{re.escape(ALL_TEXTS)}({ANY_TEXT})").fullmatch,
    ),
    ({"guided_grammar": f'root ::= "{TEXTS[0]}" "{TEXTS[2]}"'}, f"{TEXTS[0]}{TEXTS[2]}".__eq__),
    (
        {"guided_grammar": "start: <think> /a+/ </think> <tool_call> // <|im_end|>"},
        re.compile("<think>a+</think><tool_call>").fullmatch,
    ),
]  # type: ignore[assignment]


@pytest.fixture(scope="module")
def server(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = save_small_tokenizer(tmp_path_factory.mktemp("added tokens"))
    path = str(directory / "tokenizer.json")
    base = BaseTokenizer.from_file(path)
    base.add_tokens([AddedToken(text, special=text in SPECIAL) for text in TEXTS])
    base.save(path)
    tokenizer = Tokenizer.load(directory)
    model = dataclasses.replace(served_model, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    with live_server(model, FakeEngine(limits=LIMITS, script=follow_grammars(directory))) as live:
        yield live


@pytest.mark.parametrize(("fields", "is_valid"), FIELDS)
def test_the_answer_spells_added_tokens_as_the_grammar_demands(
    server: LiveServer, fields: dict[str, Any], is_valid: Callable[[str], object]
) -> None:
    body = minimal_body(COMPLETIONS) | {"max_tokens": 1500, "n": 4, "seed": 3} | fields
    response = server.http.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    texts = [choice["text"] for choice in response.json()["choices"] if choice["finish_reason"] == "stop"]
    assert len(texts) >= 3
    assert all(is_valid(text) for text in texts), texts
    for delta_size in (1, 5):
        server.engine.delta_size = delta_size
        streamed = [""] * 4
        for line in server.http.post(COMPLETIONS, json=body | {"stream": True}).text.split("\n\n"):
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    streamed[choice["index"]] += choice["text"]
        assert streamed == [choice["text"] for choice in response.json()["choices"]]


def test_arguments_of_forced_calls_spell_added_tokens(server: LiveServer) -> None:
    function = {"name": "f", "parameters": CONST}
    body = minimal_body(CHAT) | {"max_tokens": 1500, "n": 4, "seed": 3, "tool_choice": "required"}
    response = server.http.post(CHAT, json=body | {"tools": [{"type": "function", "function": function}]})
    assert response.status_code == 200, response.text
    for choice in response.json()["choices"]:
        for call in choice["message"]["tool_calls"]:
            assert jsonschema_rs.is_valid(CONST, json.loads(call["function"]["arguments"]))


def test_a_special_token_in_a_grammar_is_refused_by_name(server: LiveServer) -> None:
    for grammar in ('start: "a" <|im_end|>', "start: [INST] | <[265]>"):
        response = server.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS) | {"guided_grammar": grammar})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "guided_grammar"
