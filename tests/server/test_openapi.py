"""Schemathesis generates valid and invalid requests from our OpenAPI page; every response must conform to the page."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given

from tests.helpers.examples import examples
from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, RESPONSES
from tests.server.helpers.live_server import LiveServer
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.protocol.responses import ResponsesRequest

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
    ("POST", "/detokenize"),
    ("POST", "/tokenize"),
    ("POST", "/v1/batches"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("POST", "/v1/bulk"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/files"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/{response_id}/cancel"),
]

# The others have no body and no query. /v1/bulk answers 200 to an invalid line too: its result contains the error.
CAN_BE_INVALID = {("GET", "/v1/batches"), ("GET", "/v1/batches/{batch_id}/results"), ("GET", "/v1/files")} | {
    (method, path)
    for method, path in OPERATIONS
    if method == "POST"
    and path not in ("/v1/bulk", "/v1/batches/{batch_id}/cancel", "/v1/responses/{response_id}/cancel")
}


@schemathesis.serializer("application/x-ndjson")
def serialize_lines(_context: Any, value: Any) -> bytes:
    return str(value).encode(errors="surrogatepass")


@pytest.fixture(scope="module")
def page(shared_server: LiveServer) -> Any:
    return schemathesis.openapi.from_url(f"{shared_server.url}/openapi.json")


def test_page_lists_exactly_the_tested_operations(page: Any) -> None:
    operations = [result.ok() for result in page.get_all_operations()]
    assert sorted((operation.method.upper(), operation.path) for operation in operations) == sorted(OPERATIONS)


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
