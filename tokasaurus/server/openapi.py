"""Error responses on the OpenAPI page: for each operation exactly the statuses that it may answer."""

from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI

from tokasaurus.server.access import OPEN_PATHS
from tokasaurus.server.errors import ErrorResponse

Responses = dict[int | str, dict[str, Any]]


def error_responses(*statuses: int) -> Responses:
    """Value for a route's `responses`; DescribedApp adds 500 to every route, 401 to those that need the key, and 403
    to those that web pages may not use."""
    return {status: {"model": ErrorResponse, "description": HTTPStatus(status).phrase} for status in statuses}


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


class DescribedApp(FastAPI):
    """FastAPI with an OpenAPI page adapted to our own body parsing and to the errors that any route may answer."""

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
            _drop_unused_schemas(page)
        return super().openapi()
