"""Structured output over HTTP: the engine follows each field's grammar, and independent validators accept the text."""

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import orjson
import psutil
import pydantic
import pytest

from tests.helpers.examples import seeds
from tests.helpers.limits import join
from tests.helpers.random_schemas import random_schema
from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, RESPONSES, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.grammar_script import follow_grammars
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.server.served_model import ServedModel

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 40}, "tags": {"enum": [["x"], None, "é"]}},
    "required": ["n", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
LARK = 'start: "<" word ("," word)* ">"\nword: /[a-z]{1,3}/'
GBNF = 'root ::= "<" word ("," word)* ">"\nword ::= [a-z] [a-z]? [a-z]?'


def is_thing(text: str) -> bool:
    return jsonschema_rs.is_valid(SCHEMA, json.loads(text))


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def is_angled(text: str) -> bool:
    return re.fullmatch("<[a-z]{1,3}(,[a-z]{1,3})*>", text) is not None


FIELDS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"response_format": FORMAT}, is_thing),
    ({"response_format": {"type": "json_object"}}, is_object),
    ({"structured_outputs": {"json": SCHEMA}}, is_thing),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "whitespace_pattern": None}}, is_thing),
    ({"structured_outputs": {"json_object": True, "json": None}}, is_object),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, lambda text: " " not in text),
    ({"structured_outputs": {"regex": r"\d{2}(-[a-f/]+)?"}}, re.compile(r"\d{2}(-[a-f/]+)?").fullmatch),
    ({"structured_outputs": {"choice": ["yes", "no", "a.b|c"]}}, ["yes", "no", "a.b|c"].__contains__),
    ({"structured_outputs": {"grammar": LARK}}, is_angled),
    ({"guided_json": SCHEMA}, is_thing),
    ({"guided_json": json.dumps(SCHEMA)}, is_thing),
    ({"guided_regex": "^(ab){1,3}$"}, re.compile("(ab){1,3}").fullmatch),
    ({"guided_choice": ["é€😀", "", 'quo"te\n']}, ["é€😀", "", 'quo"te\n'].__contains__),
    ({"guided_grammar": GBNF}, is_angled),
    # guidance's model for vLLM sends both
    ({"guided_grammar": GBNF, "structured_outputs": {"grammar": GBNF}}, is_angled),
    ({"guided_grammar": r'root ::= "\u00e9" [\u4e00-\U00009fff]'}, re.compile("é[\u4e00-\u9fff]").fullmatch),
    ({"response_format": {"type": "text"}, "guided_choice": ["yes"]}, ["yes"].__contains__),
]  # type: ignore[assignment]


@pytest.fixture(scope="module")
def grammar_server(served_model: ServedModel, tokenizer_directory: Path) -> Iterator[LiveServer]:
    """A server whose engine follows grammars."""
    with live_server(served_model, FakeEngine(script=follow_grammars(tokenizer_directory))) as server:
        yield server


def texts_of(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """(text, finish_reason) of each choice."""
    return [
        (choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"])
        for choice in answer["choices"]
    ]


@pytest.mark.parametrize(("fields", "is_valid"), FIELDS)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_every_field_constrains_the_text(
    grammar_server: LiveServer, route: str, fields: dict[str, Any], is_valid: Callable[[str], bool]
) -> None:
    body = minimal_body(route) | {"max_tokens": 200, "n": 3, "seed": 1} | fields
    response = grammar_server.http.post(route, json=body)
    assert response.status_code == 200, response.text
    texts = texts_of(response.json())
    assert len(texts) == 3
    assert all(is_valid(text) for text, finish_reason in texts if finish_reason == "stop"), texts
    assert sum(finish_reason == "stop" for _, finish_reason in texts) >= 2


@pytest.mark.parametrize("seed", seeds(30))
def test_texts_for_random_schemas_pass_an_independent_validator(grammar_server: LiveServer, seed: int) -> None:
    schema = random_schema(seed)
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    body = minimal_body(CHAT) | {"max_tokens": 300, "n": 8, "seed": seed}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    answer = grammar_server.http.post(CHAT, json=body).json()
    finished_texts = [text for text, finish_reason in texts_of(answer) if finish_reason == "stop"]
    assert len(finished_texts) >= 2, schema
    for text in finished_texts:
        assert validator.is_valid(json.loads(text)), (schema, text)


def test_streamed_bulk_and_logprobs_answers_have_the_same_text(grammar_server: LiveServer) -> None:
    body = minimal_body(CHAT) | {"max_tokens": 100, "n": 2, "seed": 5, "response_format": FORMAT}
    expected = [text for text, _ in texts_of(grammar_server.http.post(CHAT, json=body).json())]
    answer = grammar_server.http.post(CHAT, json=body | {"logprobs": True}).json()
    assert [text for text, _ in texts_of(answer)] == expected
    assert (
        b"".join(bytes(token["bytes"]) for token in answer["choices"][0]["logprobs"]["content"]).decode() == expected[0]
    )
    line = {"custom_id": "1", "url": CHAT, "body": body}
    bulk = grammar_server.http.post(
        "/v1/bulk", content=orjson.dumps(line), headers={"content-type": "application/x-ndjson"}
    )
    assert [text for text, _ in texts_of(bulk.json()["response"]["body"])] == expected
    streamed = ["", ""]
    for chunk in client_of(grammar_server).chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == expected


def client_of(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


class Color(str, Enum):
    RED = "red"
    BLUE = "blue"


class Wheel(pydantic.BaseModel):
    inches: int = pydantic.Field(ge=10, le=30)
    color: Color


class Bicycle(pydantic.BaseModel):
    maker: str = pydantic.Field(pattern="^[A-Z][a-z]{1,8}$")
    wheels: list[Wheel] = pydantic.Field(min_length=2, max_length=2)
    spare: Wheel | None


def test_openai_client_parses_into_a_pydantic_model(grammar_server: LiveServer) -> None:
    completions = client_of(grammar_server).chat.completions
    messages: list[Any] = [{"role": "user", "content": "A bicycle, please."}]
    answer = completions.parse(model="default", messages=messages, response_format=Bicycle, max_tokens=300, seed=3)
    bicycle = answer.choices[0].message.parsed
    assert isinstance(bicycle, Bicycle)
    assert len(bicycle.wheels) == 2
    with completions.stream(
        model="default", messages=messages, response_format=Bicycle, max_tokens=300, seed=3
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == bicycle


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_an_unsupported_schema_or_invalid_regex_is_a_400_naming_the_field(
    grammar_server: LiveServer, route: str, stream: bool
) -> None:
    body = minimal_body(route) | {"stream": stream}
    num_requests = len(grammar_server.engine.requests)
    for fields, param in [
        ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs.json"),
        ({"guided_json": {"enum": [2**53 + 1]}}, "guided_json"),
        ({"guided_json": '{"items": {"const": 1e20}}'}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"anyOf": [False]}}}},
            "response_format",
        ),
        ({"guided_regex": "(a"}, "guided_regex"),
    ]:
        response = grammar_server.http.post(route, json=body | fields)
        assert response.status_code == 400
        assert assert_openai_error(response.content)["param"] == param
    assert len(grammar_server.engine.requests) == num_requests


DISTINCT = {"type": "array", "items": {"type": "string", "pattern": "^[a-c&&]$"}, "uniqueItems": True, "minItems": 1}


def _named(**strict: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": DISTINCT, **strict}}


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT, RESPONSES])
def test_a_keyword_that_cannot_be_followed_is_refused_only_if_strict(grammar_server: LiveServer, route: str) -> None:
    """The rest of the schema is followed. Fields of servers that always enforce a schema count as strict."""
    if route == RESPONSES:
        flat = {"type": "json_schema", "name": "s", "schema": DISTINCT}
        loose = [{"text": {"format": flat}}, {"text": {"format": flat | {"strict": False}}}]
        strict = [({"text": {"format": flat | {"strict": True}}}, "text.format")]
    else:
        formats = [_named(), _named(strict=False), _named(strict=None), {"type": "json_object", "schema": DISTINCT}]
        formats += [{"type": "json_schema", "schema": DISTINCT}, {"type": "json", "value": DISTINCT}]
        loose = [{"response_format": format_} for format_ in formats]
        strict = [
            ({"response_format": _named(strict=True)}, "response_format"),
            ({"structured_outputs": {"json": DISTINCT}}, "structured_outputs.json"),
            ({"guided_json": DISTINCT}, "guided_json"),
            ({"json_schema": json.dumps(DISTINCT)}, "json_schema"),
        ]
    question = {"model": "default", "messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
    anthropic = question | {"output_config": {"format": {"type": "json_schema", "schema": DISTINCT}}}
    refused = grammar_server.http.post("/v1/messages", json=anthropic)
    assert (refused.status_code, "contains uniqueItems at #" in refused.text) == (400, True)
    tokens = {"max_output_tokens" if route == RESPONSES else "max_tokens": 300}
    for fields in loose:
        response = grammar_server.http.post(route, json=minimal_body(route) | {"seed": 3} | tokens | fields)
        assert response.status_code == 200, (fields, response.text)
        if route != RESPONSES:
            text = texts_of(response.json())[0][0]
            assert jsonschema_rs.is_valid({**DISTINCT, "uniqueItems": False}, json.loads(text)), text
    for fields, param in strict:
        response = grammar_server.http.post(route, json=minimal_body(route) | tokens | fields)
        error = assert_openai_error(response.content)
        assert (response.status_code, error["param"]) == (400, param), fields
        assert "contains uniqueItems at #, which is not implemented" in error["message"]


@pytest.mark.skipif(not Path("/proc").exists(), reason="the test reads /proc")
def test_the_process_that_compiles_grammars_ends_with_the_server(served_model: ServedModel) -> None:
    before = grammar_processes()
    with live_server(served_model, FakeEngine()) as server:
        assert server.http.post(CHAT, json=minimal_body(CHAT) | {"guided_regex": "a"}).status_code == 200
        started = grammar_processes() - before
        assert len(started) == 1
    assert not started & grammar_processes()


def grammar_processes() -> set[str]:
    """Ids of the grammar processes that this process started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            name, state_and_parent = path.read_text().split("(", 1)[1].rsplit(") ", 1)
            if name == "toka-grammar" and state_and_parent.split()[1] == str(os.getpid()):
                found.add(path.parent.name)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the name that the process gives itself")
def test_client_is_told_to_retry_if_the_validating_processes_are_killed(server: LiveServer) -> None:
    ended = threading.Event()

    def kill_all() -> None:
        while not ended.wait(0.01):
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    if child.name() == "toka-grammar":
                        child.kill()

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        slow = minimal_body(CHAT) | {"guided_regex": "a*" * 40_000}
        response = server.http.post(CHAT, json=slow)
    finally:
        ended.set()
        join(killer)
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "1"
    assert assert_openai_error(response.content)["code"] == "grammar_validator_failed"
    assert server.http.post(CHAT, json=minimal_body(CHAT) | {"guided_regex": "a"}).status_code == 200
