"""Schemathesis generates valid and invalid requests from our OpenAPI page; every response must conform to the page."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given

from tests.helpers.examples import examples
from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, RESPONSES
from tests.server.helpers.fake_engine import FakeEngine, Reply, echo
from tests.server.helpers.live_sample import SAMPLE
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.live import LiveStage
from tokasaurus.messages.status import AdapterLoad
from tokasaurus.server.dialects.responses import ResponsesRequest
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.served_model import ServedModel

schemathesis = pytest.importorskip("schemathesis")
openapi_checks = pytest.importorskip("schemathesis.specs.openapi.checks")
checks = pytest.importorskip("schemathesis.checks")

CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]
OPERATIONS = [
    ("DELETE", "/v1/files/{file_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/ping"),
    ("GET", "/ready"),
    ("GET", "/tokenizer_info"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("GET", "/v1/batches/{batch_id}/results"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/v1/responses/{response_id}"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("GET", "/version"),
    ("POST", "/classify"),
    ("POST", "/detokenize"),
    ("POST", "/get_reward"),
    ("POST", "/pooling"),
    ("POST", "/tokenize"),
    ("POST", "/v1/batches"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("POST", "/v1/bulk"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/files"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/rerank"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("POST", "/v1/score"),
]

ENDLESS = ("GET", "/live")
"""Its answer does not end."""

# The others have no body and no query. /v1/bulk answers 200 to an invalid line too: its result contains the error.
CAN_BE_INVALID = {("GET", "/v1/batches"), ("GET", "/v1/batches/{batch_id}/results"), ("GET", "/v1/files")} | {
    (method, path)
    for method, path in OPERATIONS
    if method == "POST"
    and path not in ("/v1/bulk", "/v1/batches/{batch_id}/cancel", "/v1/responses/{response_id}/cancel")
}


WHOLE_SAMPLE = replace(
    SAMPLE, stages=(LiveStage(0.5, 0.25, 2),), stats=replace(SAMPLE.stats, adapters=(AdapterLoad("ab" * 32, 2, 1),))
)


@schemathesis.serializer("application/x-ndjson")
def serialize_lines(_context: Any, value: Any) -> bytes:
    return str(value).encode(errors="surrogatepass")


@pytest.fixture(scope="module")
def page(shared_server: LiveServer) -> Any:
    return schemathesis.openapi.from_url(f"{shared_server.url}/openapi.json")


def test_page_lists_exactly_the_tested_operations(page: Any) -> None:
    operations = [result.ok() for result in page.get_all_operations()]
    assert sorted((operation.method.upper(), operation.path) for operation in operations) == sorted(
        [*OPERATIONS, ENDLESS]
    )


def test_every_schema_on_the_page_is_referenced(shared_server: LiveServer) -> None:
    page = shared_server.http.get("/openapi.json")
    names = page.json()["components"]["schemas"]
    assert [name for name in names if f'"#/components/schemas/{name}"' not in page.text] == []


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        (method, path, mode)
        for method, path in OPERATIONS
        for mode in schemathesis.GenerationMode
        if mode == schemathesis.GenerationMode.POSITIVE or (method, path) in CAN_BE_INVALID
    ],
)
def test_every_response_conforms_to_the_page_and_none_is_a_server_error(
    page: Any, method: str, path: str, mode: Any
) -> None:
    operation = page[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @examples(30, 6, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    def ask(case: Any) -> None:
        model = case.body.get("model") if isinstance(case.body, dict) else None
        if isinstance(model, str) and len(model) != 1:
            # A generated name would be a 404, and the rest of the body would not be tested.
            case.body["model"] = "default"
        case.call_and_validate(checks=CHECKS)

    ask()


def test_events_of_the_live_page_have_the_fields_of_their_schema(served_model: ServedModel) -> None:
    """And no others: the page tells all."""

    def answer_short(request: GenerateRequest, index: int) -> Reply | None:
        return echo(request, index) if request.max_new_tokens == 1 else None

    engine = FakeEngine(answer_short, sample=lambda _: WHOLE_SAMPLE)
    with live_server(served_model, engine) as server:
        line = {"url": COMPLETIONS, "body": {"prompt": "a", "max_tokens": 1}}
        lines = [line | {"custom_id": "a"}, line | {"custom_id": "b", "body": {"prompt": "a", "max_tokens": 9}}]
        content = "\n".join(map(json.dumps, lines))  # the second line stays open
        page = server.http.get("/openapi.json").json()
        with server.http.stream("GET", "/live") as answer, server.http.stream("POST", "/v1/bulk", content=content):
            events = (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line)
            event = next(event for event in itertools.islice(events, 20) if event["jobs"])
    kind, described = next(iter(page["paths"]["/live"]["get"]["responses"]["200"]["content"].items()))
    assert (kind, described["schema"]) == ("text/event-stream", {"$ref": "#/components/schemas/LiveEvent"})
    schema = described["schema"] | {"components": page["components"]}
    assert [error.message for error in jsonschema_rs.Draft202012Validator(schema).iter_errors(event)] == []
    assert set(missing_from(page, described["schema"], event)) == set()
    names = page["components"]["schemas"]["LiveReplica"]["properties"]
    assert event["replicas"][0].keys() == names.keys(), "the sample has all that a replica may have"


def missing_from(page: Any, schema: Any, value: Any) -> Iterator[str]:
    """Keys of objects in the value that the schema does not have."""
    if "$ref" in schema:
        schema = page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for alternative in schema.get("anyOf", ()):
        yield from missing_from(page, alternative, value) if alternative.get("type") != "null" else ()
    if isinstance(value, list):
        for item in value:
            yield from missing_from(page, schema.get("items", {}), item)
    if isinstance(value, dict) and "properties" in schema:
        for name, inner in value.items():
            if name in schema["properties"]:
                yield from missing_from(page, schema["properties"][name], inner)
            else:
                yield name


def test_page_describes_request_bodies_and_error_statuses(shared_server: LiveServer) -> None:
    page = shared_server.http.get("/openapi.json").json()
    for route, model in (
        (COMPLETIONS, CompletionRequest),
        (CHAT, ChatCompletionRequest),
        (RESPONSES, ResponsesRequest),
    ):
        operation = page["paths"][route]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = page["components"]["schemas"][reference.rpartition("/")[2]]
        assert set(schema["properties"]) == set(model.model_fields)
        assert {"type": "string", "minLength": 1, "maxLength": 1024} in schema["properties"]["cache_salt"]["anyOf"]
        assert "cache_salt" not in schema["required"]
        assert set(operation["responses"]) == {"200", "400", "401", "403", "404", "413", "415", "429", "500", "503"}
        assert "403" not in page["paths"]["/v1/models"]["get"]["responses"]
        for name in ("n", "temperature", "stream", "cache_salt", "stop"):
            assert {"type": "null"} in schema["properties"][name]["anyOf"]
    assert "401" not in page["paths"]["/health"]["get"]["responses"]
