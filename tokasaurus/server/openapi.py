"""The OpenAPI page: for each operation exactly the statuses that it may answer, and a body that it accepts. Errors in
queries, which FastAPI reads."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, get_type_hints

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError

from tokasaurus.server.access import OPEN_PATHS
from tokasaurus.server.errors import ErrorResponse, error_response, one_error
from tokasaurus.server.json_values import problems_of

Responses = dict[int | str, dict[str, Any]]

_EVENT_PATHS = ("/live",)
"""Their answer is a stream of events; the schema describes one event."""


def error_responses(*statuses: int, model: type = ErrorResponse) -> Responses:
    """Value for a route's `responses`; DescribedApp adds 500 to every route, 401 to routes that need the key, and 403
    to routes that web pages may not use."""
    return {status: {"model": model, "description": HTTPStatus(status).phrase} for status in statuses}


def answers(
    answer: type, *statuses: int, content: Mapping[str, Any] | None = None, errors: type = ErrorResponse
) -> Responses:
    """Value for a route's `responses`: the class of its answer, other contents of it if there are any, its errors."""
    described: dict[str, Any] = {"model": answer} if content is None else {"model": answer, "content": content}
    return {200: described, **error_responses(*statuses, model=errors)}


def example_body(body: Mapping[str, object]) -> dict[str, Any]:
    """Value for a route's `openapi_extra`: a body that it accepts, which the page offers to send."""
    return {"requestBody": {"content": {"application/json": {"example": body}}}}


# For routes that read a JSON body.
BODY_ERRORS = (400, 413, 415)


def _drop_unused_schemas(page: dict[str, Any]) -> None:
    """Drop the schemas of FastAPI's 422, and of classes that no remaining schema refers to."""
    schemas = page["components"]["schemas"]

    def is_used(name: str) -> bool:
        return f'"#/components/schemas/{name}"'.encode() in orjson.dumps(page)

    while unused := [name for name in schemas if not is_used(name)]:
        for name in unused:
            del schemas[name]


async def _on_query_error(request: Request, error: Exception) -> Response:
    """Errors in the parameters of a path or a query; bodies are parsed by `json_body`."""
    assert isinstance(error, RequestValidationError)
    found = [details | {"loc": details["loc"][1:]} for details in error.errors()]  # without "query" or "path"
    query_model = get_type_hints(request.scope["route"].endpoint).get("query")
    return error_response(one_error(*problems_of(found, query_model)))


class DescribedApp(FastAPI):
    """FastAPI with an OpenAPI page adapted to our own body parsing and to the errors that any route may answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_exception_handler(RequestValidationError, _on_query_error)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            page = super().openapi()
            for path, operations in page["paths"].items():
                schema = "MessagesError" if path.startswith("/v1/messages") else "ErrorResponse"
                error = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}}
                for method, operation in operations.items():
                    responses = operation["responses"]
                    responses.pop("422", None)  # for FastAPI's own body parsing, which we do not use
                    responses["500"] = {"description": "internal server error", **error}
                    if method != "get":
                        responses["403"] = {"description": "a web page of another site sent the request", **error}
                    if path not in OPEN_PATHS:
                        responses["401"] = {"description": "the server's API key is missing or wrong", **error}
                    if path in _EVENT_PATHS:
                        answer = responses["200"]
                        answer["content"] = {"text/event-stream": answer["content"]["application/json"]}
            _drop_unused_schemas(page)
        return super().openapi()
