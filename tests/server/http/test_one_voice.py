"""Messages about bad bodies, queries and forms, at every endpoint: the field, what is wrong, what is allowed."""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, RESPONSES, minimal_body, refused_quickly
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.jobs.helpers.forms import FORM, field_part, file_part, form
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.value_words import words_for

MESSAGES, TOKENS, TEXT = "/v1/messages", "/inference/v1/generate", "/generate"
BATCH = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
MINIMAL: dict[str, dict[str, Any]] = {
    **{route: minimal_body(route) for route in (COMPLETIONS, CHAT, RESPONSES, MESSAGES)},
    f"{MESSAGES}/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/batches": BATCH,
    TOKENS: {"token_ids": [1]},
    TEXT: {"text": "a"},
    "/pause_generation": {},
    "/abort_request": {},
    "/update_weights": {"weight_dir": "/x"},
    "/update_weights_from_disk": {"model_path": "/x"},
}
# Of every generation route: a change of the body, and the message.
SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 9}, "temperature must be at most 2"),
    ({"temperature": -1}, "temperature must be at least 0"),
    ({"temperature": "1"}, "temperature must be a number"),
    ({"top_p": 0}, "top_p must be greater than 0"),
    ({"top_k": 1.5}, "top_k must be a whole number"),
    ({"ignore_eos": 1}, "ignore_eos must be true or false"),
    ({"stop": 5}, "stop must be a string or a list of strings"),
    ({"seed": 2**70}, "seed must be at most 18446744073709551615"),
    ({"user": 5}, "user must be a string"),
    ({"stream": "yes"}, "stream must be true or false"),
    ({"stream": True, "stream_options": 5}, "stream_options must be an object"),
    ({"request_id": ""}, "request_id must be 1 to 200 characters of printable ASCII"),
    ({"temprature": 1}, "unknown field 'temprature': did you mean 'temperature'?"),
    ({"no_such_thing": 1}, "unknown field 'no_such_thing'"),
    (
        {"logits_processors": ["x"]},
        "logits_processors is a field of vLLM that is not implemented here: only null and [] are accepted; code of a "
        "client does not run on this server",
    ),
]
TABLE: list[tuple[str, dict[str, Any], str]] = [
    *((route, change, words) for route in (COMPLETIONS, CHAT, RESPONSES) for change, words in SAMPLING),
    (COMPLETIONS, {"prompt": None}, "prompt is required"),
    (COMPLETIONS, {"n": 0}, "n must be at least 1"),
    (CHAT, {"n": "1"}, "n must be a whole number"),
    (CHAT, {"messages": []}, "messages must not be empty"),
    (CHAT, {"messages": "a"}, "messages must be a list"),
    (CHAT, {"messages": [5]}, "messages[0] must be an object"),
    (CHAT, {"messages": [{"role": "x", "content": "a"}]}, 'messages[0].role must be "system", "developer", '),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content is required"),
    (CHAT, {"messages": [{"role": "user", "contents": "a"}]}, "unknown field 'messages[0].contents': did you mean"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name is required"),
    (CHAT, {"tool_choice": "sometimes"}, "tool_choice must be"),
    (
        CHAT,
        {"top_logprobs": 99, "logprobs": True},
        "top_logprobs may be at most 20, which the flag max_topk_logprobs= sets",
    ),
    (RESPONSES, {"input": 5}, "input must be"),
    (RESPONSES, {"include": ["all"]}, 'include[0] must be "file_search_call.results", '),
    (CHAT, {"reasoning_effort": "huge"}, 'reasoning_effort must be "none", "minimal", '),
    (RESPONSES, {"reasoning": {"summary": "long"}}, 'reasoning.summary must be "auto", "concise" or "detailed"'),
    *(
        (route, {name: value}, f"{name} is not implemented beyond {neutral}; the answer here has no place for it; ")
        for route in (RESPONSES, MESSAGES)
        for name, value, neutral in (
            ("echo", True, "null and false"),
            ("return_token_ids", True, "null and false"),
            ("prompt_logprobs", 0, "null"),
        )
    ),
    (MESSAGES, {"max_tokens": None}, "max_tokens is required"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens must be at least 1"),
    (f"{MESSAGES}/count_tokens", {"messages": 5}, "messages must be a list"),
    ("/tokenize", {"prompt": 5}, "prompt must be a string"),
    ("/tokenize", {"promt": "a"}, "unknown field 'promt': did you mean 'prompt'?"),
    ("/tokenize", {"messages": []}, "messages must not be empty"),
    ("/detokenize", {"tokens": "a"}, "tokens must be a list"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0] must be a whole number"),
    ("/detokenize", {"token": [1]}, "unknown field 'token': did you mean 'tokens'?"),
    ("/v1/batches", {"endpoint": "/v1/moderations"}, 'endpoint must be "/classify", "/get_reward", "/pooling", '),
    ("/v1/batches", {"completion_window": "1y"}, 'completion_window must be "24h", or another whole number'),
    ("/v1/batches", {"metadata": {"a": 5}}, "metadata.a must be a string"),
    ("/v1/batches", {"metadata": {"a": "b" * 513}}, "metadata.a may have at most 512 characters"),
    ("/v1/batches", {"input_file": "x"}, "unknown field 'input_file': did you mean 'input_file_id'?"),
    (
        "/v1/batches",
        {"output_expires_after": {"anchor": "now", "seconds": 1}},
        'output_expires_after.anchor must be "created_at"',
    ),
    (TOKENS, {"token_ids": []}, "token_ids must not be empty"),
    (TOKENS, {"sampling_params": {"temprature": 1}}, "unknown field 'sampling_params.temprature': did you mean"),
    (TOKENS, {"sampling_params": {"n": 0}}, "sampling_params.n must be at least 1"),
    (TEXT, {"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens must be at least 0"),
    (TEXT, {"sampling_parms": {}}, "unknown field 'sampling_parms': did you mean 'sampling_params'?"),
    ("/pause_generation", {"mode": "stop"}, 'mode must be "abort", "retract" or "in_place"'),
    ("/abort_request", {"abort_al": True}, "unknown field 'abort_al': did you mean 'abort_all'?"),
    ("/update_weights", {"weight_dir": ""}, "weight_dir must not be empty"),
    ("/update_weights_from_disk", {"model_path": 5}, "model_path must be a string"),
]
QUERIES = [
    ("/v1/files?limit=0", "limit must be at least 1"),
    ("/v1/files?limit=x", "limit must be a whole number"),
    ("/v1/files?order=up", 'order must be "asc" or "desc"'),
    ("/v1/files?limt=5", "unknown field 'limt': did you mean 'limit'?"),
    ("/v1/files?order=up&limit=0&limt=5", "3 problems: (1) unknown field 'limt': did you mean 'limit'?; (2) "),
    ("/v1/batches?limit=101", "limit must be at most 100"),
    ("/v1/batches?affter=x", "unknown field 'affter': did you mean 'after'?"),
    ("/v1/batches/batch_1/results?first=-1", "first must be at least 0"),
    ("/v1/batches/batch_1/results?frist=1", "unknown field 'frist': did you mean 'first'?"),
]
PURPOSE, FILE = field_part("purpose", "batch"), file_part(b"a")
ANCHOR = field_part("expires_after[anchor]", "created_at")
FORMS = [
    (form(FILE), "purpose is required"),
    (form(PURPOSE), "file is required: the body has no part of this name"),
    (form(field_part("purpos", "batch"), FILE), "unknown field 'purpos': did you mean 'purpose'?"),
    (form(field_part("purpose", "vision"), FILE), "purpose must be 'batch', not 'vision'"),
    (
        form(PURPOSE, ANCHOR, field_part("expires_after[seconds]", "5"), FILE),
        "expires_after.seconds must be at least 3600",
    ),
]
OF_PYTHON = re.compile(r"Input should|Value error|Field required|\b(None|True|False)\b|valid (string|integer|number)")


@pytest.fixture(scope="module")
def server(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = dataclasses.replace(served_model, rl=True)
    with live_server(model, FakeEngine(), data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


def check(answer: httpx.Response, words: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error["message"]
    assert words in message
    param = error.get("param")
    if param is not None:
        assert re.sub(r"^\d+ problems: \(1\) ", "", message).startswith((param, f"unknown field {param!r}"))
    assert not OF_PYTHON.search(message), message
    assert not message.endswith(".")
    assert "\n" not in message


def body_of(route: str, change: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that are changed to null."""
    return {name: value for name, value in (MINIMAL[route] | change).items() if value is not None}


@pytest.mark.parametrize(("route", "change", "words"), TABLE)
def test_bodies(server: LiveServer, route: str, change: dict[str, Any], words: str) -> None:
    check(server.http.post(route, content=json.dumps(body_of(route, change))), words)


# Of a body that has all of these problems, what its message lists, in this order; the first is its `param`.
SEVERAL: list[tuple[str, dict[str, Any], list[str]]] = [
    *(
        (
            route,
            {"temperature": 9, "top_p": 0, "user": 5, "temprature": 1, "suffixx": ""},
            [
                "unknown field 'temprature': did you mean 'temperature'?",
                "unknown field 'suffixx'",
                "temperature must be at most 2",
                "top_p must be greater than 0",
                "user must be a string",
            ],
        )
        for route in (CHAT, RESPONSES)
    ),
    # a missing field is no problem beside the misspelt one that stands for it
    (
        COMPLETIONS,
        {"prompt": None, "promt": "a", "n": 0},
        ["unknown field 'promt': did you mean 'prompt'?", "n must be at least 1"],
    ),
    (COMPLETIONS, {"prompt": None, "no_such": 1}, ["unknown field 'no_such'", "prompt is required"]),
    (
        CHAT,
        {"messages": [{"role": "system", "content": "a"}, {"role": "asistant", "tool_calls": [], "nmae": "a"}]},
        ["unknown field 'messages[1].nmae': did you mean 'name'?", "messages[1].role must be "],
    ),
    (
        CHAT,
        {"": 1, "messages": [{"role": "x", "content": "a", "type": "message"}], "reasoning_effort": "huge"},
        ["unknown field 'messages[0].type'", "unknown field ''", "reasoning_effort must ", "messages[0].role must be "],
    ),
    # of an object whose type is wrong, no other field is
    (CHAT, {"tools": [{"type": "custom", "custom": {}}], "n": 0}, ["n must be ", "tools[0].type is not implemented "]),
    (CHAT, {"messages": [{"content": 5}]}, ["messages[0].role is required", "messages[0].content must be a string"]),
    (MESSAGES, {"max_tokens": 0, "top_k": "a"}, ["top_k must be a whole number", "max_tokens must be at least 1"]),
    (f"{MESSAGES}/count_tokens", {"messages": 5, "sytem": "a"}, ["unknown field 'sytem'", "messages must be a list"]),
    ("/tokenize", {"prompt": 5, "add_special_tokens": 1}, ["prompt must be a string", "add_special_tokens must be "]),
    (
        "/v1/batches",
        {"endpoint": "/v1/moderations", "completion_window": 5, "metadata": {"a": 5, "type": 6}},
        ["endpoint must be ", "completion_window must be ", "metadata.a must be ", "metadata.type must be a string"],
    ),
    (
        TOKENS,
        {"token_ids": [], "sampling_params": {"n": 0, "temprature": 1}},
        ["unknown field 'sampling_params.temprature'", "token_ids must not be empty", "sampling_params.n must be "],
    ),
    (TEXT, {"text": 5, "sampling_params": {"top_k": "1"}}, ["text must be ", "sampling_params.top_k must be "]),
    ("/abort_request", {"rid": 5, "abort_al": 1}, ["unknown field 'abort_al'", "rid must be "]),
    ("/update_weights", {"weight_dir": 5, "mode": "x"}, ["weight_dir must be a string", "mode must be "]),
]


def check_listed(message: str, words: list[str]) -> None:
    head, *listed = re.split(r"(?:; )?\(\d+\) ", message)
    assert head == f"{len(words)} problems: "
    assert all(problem.startswith(start) for problem, start in zip(listed, words, strict=True)), message


@pytest.mark.parametrize(("route", "change", "words"), SEVERAL)
def test_all_wrong_fields_of_a_body_are_told(
    server: LiveServer, route: str, change: dict[str, Any], words: list[str]
) -> None:
    answer = server.http.post(route, content=json.dumps(body_of(route, change)))
    error = answer.json()["error"]
    assert answer.status_code == 400
    check_listed(error["message"], words)
    assert not OF_PYTHON.search(error["message"])
    if "param" in error:  # Anthropic's has none
        assert words[0].startswith((error["param"], f"unknown field {error['param']!r}"))
        alone = server.http.post(
            route, content=json.dumps(body_of(route, dict([first_change(change, error["param"])])))
        )
        assert (error["code"], error["param"]) == (alone.json()["error"]["code"], alone.json()["error"]["param"])


def first_change(change: dict[str, Any], param: str) -> tuple[str, Any]:
    """The part of the change that has this param's field."""
    name = re.split(r"[.\[]", param)[0]
    return name, change[name]


@pytest.mark.parametrize("number", [10, 11, 60])
def test_a_message_lists_ten_problems(server: LiveServer, number: int) -> None:
    body = body_of(CHAT, {f"field_{index}": 1 for index in range(number)})
    message = server.http.post(CHAT, json=body).json()["error"]["message"]
    assert message.startswith(f"{number} problems: (1) unknown field 'field_0'; (2) ")
    assert "; (10) unknown field 'field_9'" in message
    assert "(11)" not in message
    assert message.endswith({10: "'field_9'", 11: "; and 1 more", 60: "; and 50 more"}[number])


MANY = {f"field_{index}": 1 for index in range(200_000)}


@pytest.mark.parametrize(
    ("route", "change", "start"),
    [
        (CHAT, MANY, "at least 100 problems: (1) unknown field 'field_0'; "),
        (CHAT, {"stream": True, "stream_options": MANY}, "at least 100 problems: (1) unknown field 'stream_options."),
        ("/v1/batches", {"metadata": MANY}, "metadata may have at most 16 items"),
        ("/release_memory_occupation", {"tags": ["a"] * 200_000}, "tags[0] must be "),
    ],
)
def test_very_many_problems_are_refused_quickly(
    server: LiveServer, route: str, change: dict[str, Any], start: str
) -> None:
    answer = refused_quickly(server, route, json.dumps(MINIMAL.get(route, {}) | change))
    assert answer.json()["error"]["message"].startswith(start)
    assert len(answer.content) < 2000


@pytest.mark.parametrize("route", MINIMAL)
def test_what_is_no_object_at_all(server: LiveServer, route: str) -> None:
    for content, words in ((b"5", "the body must be a JSON object"), (b"{", "the body is not valid JSON: ")):
        answer = server.http.post(route, content=content)
        assert words in answer.json()["error"]["message"]
        check(answer, words)


@pytest.mark.parametrize(("path", "words"), QUERIES)
def test_queries(server: LiveServer, path: str, words: str) -> None:
    check(server.http.get(path), words)


@pytest.mark.parametrize(("content", "words"), FORMS)
def test_forms(server: LiveServer, content: bytes, words: str) -> None:
    check(server.http.post("/v1/files", content=content, headers={"Content-Type": FORM}), words)


def test_lines_of_bulk_requests_have_the_same_words(server: LiveServer) -> None:
    bad = [row for row in TABLE if row[0] in (COMPLETIONS, CHAT, RESPONSES, MESSAGES) and "stream" not in row[1]]
    lines: list[dict[str, Any]] = [
        {"custom_id": str(number), "url": route, "body": body_of(route, change)}
        for number, (route, change, _) in enumerate(bad)
    ]
    lines.append({"custom_id": "no url", "ulr": CHAT, "body": {}})
    several = [row for row in SEVERAL if row[0] in (COMPLETIONS, CHAT, RESPONSES, MESSAGES)]
    lines += [
        {"custom_id": f"several {number}", "url": route, "body": body_of(route, change)}
        for number, (route, change, _) in enumerate(several)
    ]
    answer = server.http.post("/v1/bulk", content="\n".join(map(json.dumps, lines)))
    messages = {line["custom_id"]: line["error"]["message"] for line in map(json.loads, answer.text.splitlines())}
    for number, (_, _, words) in enumerate(bad):
        assert words in messages[str(number)]
    for number, (_, _, all_words) in enumerate(several):
        check_listed(messages[f"several {number}"], all_words)
    assert messages["no url"] == "unknown field 'ulr': did you mean 'url'?"


def test_every_error_of_pydantic_that_bodies_can_have_has_words() -> None:
    """Found by validating what no type accepts."""
    values: list[Any] = [None, True, 5, 1.5, -1, 10**6, "x", "", [], ["x"] * 9, {}, {"x": 1}, float("nan")]
    types: list[Any] = [int, float, bool, str, list[int], dict[str, str], BaseModel]
    seen = set()
    for type_ in types:
        for strict in (True, False):
            for value in values:
                try:
                    TypeAdapter(type_).validate_python(value, strict=strict)
                except ValidationError as error:
                    for details in error.errors(include_url=False):
                        words = words_for(details)
                        seen.add(details["type"])
                        assert re.match("(must|may) ", words), details
                        assert not OF_PYTHON.search(words), details
    assert len(seen) >= 10
