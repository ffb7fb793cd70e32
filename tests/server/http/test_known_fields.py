"""Every row of the table of known fields holds at every endpoint, live, in a bulk request and in a batch."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import input_token_count_params
from openai.types.responses import response_create_params as response_params

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.server.dialects.responses import CountInputRequest, ResponsesRequest
from tokasaurus.server.endpoints import ENDPOINTS
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.protocol.fields import is_same
from tokasaurus.server.protocol.known_fields import KNOWN_FIELDS, KnownField, advice
from tokasaurus.server.protocol.sampling_fields import SamplingFields
from tokasaurus.server.served_model import ServedModel

RESPONSES = "/v1/responses"
ROUTES = {"chat": CHAT, "completions": COMPLETIONS}
WITHOUT_PLACE = {"prompt_logprobs", "return_token_ids", "echo", "return_routed_experts", "routed_experts_prompt_start"}
"""Fields of chat whose results have no place in the answer of /v1/responses."""
OTHER = "no value of any field"
"""A value that no field of the table accepts, whose other values are refused."""


def bodies(values_of: Any) -> list[tuple[str, dict[str, Any]]]:
    """(route, body) for each field of the table, its endpoints, and the values that `values_of` finds."""
    return [
        (ROUTES[endpoint], minimal_body(ROUTES[endpoint]) | {name: value})
        for name, field in KNOWN_FIELDS.items()
        for endpoint in field.endpoints
        for value in values_of(field)
    ]


def bodies_of_responses(values_of: Any) -> list[tuple[str, dict[str, Any]]]:
    minimal = {"model": "default", "input": "hello", "max_output_tokens": 2}
    return [
        (RESPONSES, minimal | {name: value})
        for name, field in KNOWN_FIELDS.items()
        if "chat" in field.endpoints and name in ResponsesRequest.model_fields and name not in WITHOUT_PLACE
        for value in values_of(field)
    ]


def accepted_values(field: KnownField) -> tuple[object, ...]:
    return (*field.neutral, *field.examples)


def refused_values(field: KnownField) -> list[object]:
    return [OTHER] if field.is_neutral_only else []


ACCEPTED = [*bodies(accepted_values), *bodies_of_responses(accepted_values)]
REFUSED = [*bodies(refused_values), *bodies_of_responses(refused_values)]


def field_of(body: dict[str, Any]) -> str:
    return list(body)[-1]


def test_the_table_has_only_fields_that_the_bodies_have() -> None:
    models = {"chat": ChatCompletionRequest, "completions": CompletionRequest}
    chats = {name for name, field in KNOWN_FIELDS.items() if "chat" in field.endpoints}
    assert chats - set(ResponsesRequest.model_fields) <= WITHOUT_PLACE
    for name, field in KNOWN_FIELDS.items():
        assert not (field.effect and field.instead), name
        for endpoint, model in models.items():
            assert (name in model.model_fields) == (endpoint in field.endpoints), (name, endpoint)


PARAMS_OF_OPENAI: list[tuple[type, type[SamplingFields]]] = [
    (chat_params.CompletionCreateParamsBase, ChatCompletionRequest),
    (completion_params.CompletionCreateParamsBase, CompletionRequest),
    (response_params.ResponseCreateParamsBase, ResponsesRequest),
    (input_token_count_params.InputTokenCountParams, CountInputRequest),
]


@pytest.mark.parametrize(("params", "model"), PARAMS_OF_OPENAI)
def test_every_field_that_openais_client_has_is_a_field_here(params: type, model: type[SamplingFields]) -> None:
    names = {name for base in params.__mro__ for name in getattr(base, "__annotations__", ())}
    assert len(names) > 10
    assert names <= set(model.model_fields)


def test_logprobs_of_completions_may_be_a_truth_value(shared_server: LiveServer) -> None:
    for truth, number in ((True, 1), (False, None)):
        answers = [
            shared_server.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS) | {"seed": 5, "logprobs": value}).json()
            for value in (truth, number)
        ]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert (answers[0]["choices"][0]["logprobs"] is None) == (number is None)


# A thousand cases take less time in one test each than as tests of their own.


def test_neutral_and_implemented_values_are_accepted(shared_server: LiveServer) -> None:
    for route, body in ACCEPTED:
        response = shared_server.http.post(route, json=body)
        assert response.status_code == 200, (route, body, response.text)


def test_the_engine_gets_the_same_request_from_responses_as_from_a_chat(shared_server: LiveServer) -> None:
    for _, full in bodies_of_responses(accepted_values):
        name = field_of(full)
        found = []
        for route, body in (
            (CHAT, minimal_body(CHAT)),
            (RESPONSES, {"model": "default", "input": "hello", "max_output_tokens": 2}),
        ):
            assert shared_server.http.post(route, json={**body, "seed": 1, name: full[name]}).status_code == 200
            request = shared_server.engine.requests[-1]
            own = {"request_id": "", "arrived_s": 0.0, "prompt_ids": request.prompt_ids.tolist()}
            found.append(dataclasses.asdict(request) | own)
        assert found[0] == found[1], full


@pytest.mark.parametrize("field", [name for name, field in KNOWN_FIELDS.items() if not field.effect])
def test_neutral_values_change_nothing(shared_server: LiveServer, field: str) -> None:
    for endpoint in KNOWN_FIELDS[field].endpoints:
        plain = minimal_body(ROUTES[endpoint]) | {"seed": 5}
        for value in KNOWN_FIELDS[field].neutral:
            answers = [
                shared_server.http.post(ROUTES[endpoint], json=body).json() for body in (plain, plain | {field: value})
            ]
            assert answers[0]["choices"] == answers[1]["choices"]


def test_other_values_are_refused_with_the_tables_words(shared_server: LiveServer) -> None:
    for route, body in REFUSED:
        name = field_of(body)
        response = shared_server.http.post(route, json=body)
        check_refusal(assert_openai_error(response.content), name, KNOWN_FIELDS[name])
        assert response.status_code == 400, (route, body)


def check_refusal(error: dict[str, Any], name: str, field: KnownField) -> None:
    assert (error["param"], error["code"], error["type"]) == (name, "unsupported_parameter", "invalid_request_error")
    assert error["message"].startswith(f"{name} is a field of ")
    assert "is not implemented here: only null" in error["message"]
    assert all(server in error["message"] for server in field.servers)
    assert field.instead in error["message"]


def test_every_field_reaches_a_bulk_request(shared_server: LiveServer) -> None:
    asked = {str(number): pair for number, pair in enumerate([*ACCEPTED, *REFUSED])}
    lines = [{"custom_id": id_, "url": route, "body": body} for id_, (route, body) in asked.items()]
    response = shared_server.http.post("/v1/bulk", content="\n".join(map(json.dumps, lines)))
    results = [json.loads(line) for line in response.text.splitlines()]
    assert {result["custom_id"] for result in results} == asked.keys()
    for result in results:
        check_result(result, int(result["custom_id"]))


def check_result(result: dict[str, Any], number: int) -> None:
    status, answer = result["response"]["status_code"], result["response"]["body"]
    if number < len(ACCEPTED):
        assert status == 200, (ACCEPTED[number], answer)
    else:
        name = field_of(REFUSED[number - len(ACCEPTED)][1])
        assert status == 400
        check_refusal(answer["error"], name, KNOWN_FIELDS[name])


def test_every_field_reaches_a_batch(served_model: ServedModel, tmp_path: Path) -> None:
    with live_server(served_model, FakeEngine(), data_dir=tmp_path) as server:
        for route in ENDPOINTS:
            own = [number for number, (url, _) in enumerate([*ACCEPTED, *REFUSED]) if url == route]
            if own:
                for result in run_batch(server.http, route, own):
                    check_result(result, int(result["custom_id"]))


def run_batch(http: httpx.Client, route: str, numbers: list[int]) -> list[dict[str, Any]]:
    pairs = [*ACCEPTED, *REFUSED]
    lines = [{"custom_id": str(number), "method": "POST", "url": route, "body": pairs[number][1]} for number in numbers]
    content = "\n".join(map(json.dumps, lines)).encode()
    files = {"file": ("input.jsonl", content)}
    file_id = http.post("/v1/files", data={"purpose": "batch"}, files=files).json()["id"]
    created = {"input_file_id": file_id, "endpoint": route, "completion_window": "24h"}
    batch = http.post("/v1/batches", json=created).json()
    while batch["status"] not in ("completed", "failed"):
        batch = http.get(f"/v1/batches/{batch['id']}").json()
    assert batch["status"] == "completed", batch
    found = [
        json.loads(line)
        for name in ("output_file_id", "error_file_id")
        if batch[name] is not None
        for line in http.get(f"/v1/files/{batch[name]}/content").text.splitlines()
    ]
    assert sorted(int(result["custom_id"]) for result in found) == sorted(numbers)
    return found


@pytest.mark.parametrize("streams", [False, True])
def test_an_echoed_chat_begins_with_the_assistants_last_message(shared_server: LiveServer, streams: bool) -> None:
    texts = []
    for role, echo in (("assistant", False), ("assistant", True), ("user", True)):
        messages = [{"role": "user", "content": "hello"}, {"role": role, "content": "Once upon"}]
        fields = {"messages": messages, "echo": echo, "n": 2, "seed": 1, "stream": streams}
        answer = shared_server.http.post(CHAT, json=minimal_body(CHAT) | fields).text
        objects = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        contents = ["", ""]
        for choice in [choice for body in objects or [json.loads(answer)] for choice in body["choices"]]:
            contents[choice["index"]] += choice["delta" if streams else "message"].get("content") or ""
        texts.append(contents)
    plain, echoed, other = texts
    assert echoed == ["Once upon" + text for text in plain]
    assert not any(text.startswith("Once upon") for text in other)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("temprature", "temperature"),
        ("top-k", "top_k"),
        ("topK", "top_k"),
        ("repitition_penalty", "repetition_penalty"),
        ("stop_token_id", "stop_token_ids"),
        ("guided_jsn", "guided_json"),
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_misspelt_field_is_answered_with_the_right_name(
    shared_server: LiveServer, route: str, name: str, meant: str
) -> None:
    error = assert_openai_error(shared_server.http.post(route, json=minimal_body(route) | {name: 1}).content)
    assert error["message"] == f"unknown field {name!r}: did you mean {meant!r}?"
    assert (error["param"], error["code"]) == (name, "unknown_parameter")


@pytest.mark.parametrize(
    ("change", "param", "meant"),
    [
        (
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "include_usage",
        ),
        ({"messages": [{"role": "user", "contents": "a"}]}, "messages[0].contents", "content"),
    ],
)
def test_a_misspelt_field_within_an_object_too(
    shared_server: LiveServer, change: dict[str, Any], param: str, meant: str
) -> None:
    error = assert_openai_error(shared_server.http.post(CHAT, json=minimal_body(CHAT) | change).content)
    assert error["message"] == f"unknown field {param!r}: did you mean {meant!r}?"
    assert (error["param"], error["code"]) == (param, "unknown_parameter")


def test_names_that_are_far_from_all_others_get_no_advice() -> None:
    assert advice("no_such_field", ["temperature", "top_p"]) == ""
    assert advice("x" * 100_000, ["temperature", "top_p"]) == ""
    assert advice("suffix", ["temperature"]) == ": it belongs to bodies of completions"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"max_tokens": 0}, "invalid_value"),
        ({"temperature": "1"}, "invalid_type"),
        ({"stop": 5}, "invalid_value"),
        ({"response_format": {"type": "structural_tag"}}, "unsupported_value"),
        ({"structured_outputs": {"regex": "a", "backend": "xgrammar"}}, "unsupported_value"),
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_errors_about_fields_have_a_code(
    shared_server: LiveServer, route: str, change: dict[str, Any], code: str
) -> None:
    error = assert_openai_error(shared_server.http.post(route, json=minimal_body(route) | change).content)
    assert (error["code"], error["param"]) == (code, next(iter(change)))


@pytest.mark.parametrize(("route", "name"), [(COMPLETIONS, "prompt"), (CHAT, "messages")])
def test_a_missing_field_has_a_code(shared_server: LiveServer, route: str, name: str) -> None:
    body = {field: value for field, value in minimal_body(route).items() if field != name}
    error = assert_openai_error(shared_server.http.post(route, json=body).content)
    assert (error["code"], error["param"]) == ("missing_required_parameter", name)


def test_numbers_are_compared_by_value_and_truth_values_apart() -> None:
    assert is_same(1.0, 1)
    assert is_same(0, 0.0)
    assert not is_same(True, 1)
    assert not is_same(0, False)
    assert is_same([], [])
    assert not is_same("", [])
