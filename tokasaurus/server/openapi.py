"""What the OpenAPI page says of errors: for each operation every status that it may answer, and no other."""

from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI

from tokasaurus.server.api_key import OPEN_PATHS
from tokasaurus.server.errors import ErrorResponse

Responses = dict[int | str, dict[str, Any]]


def error_responses(*statuses: int) -> Responses:
    """For a route's `responses`. 401 and 500 are added to every route."""
    return {status: {"model": ErrorResponse, "description": HTTPStatus(status).phrase} for status in statuses}


# Of routes that read a JSON body.
BODY_ERRORS = (400, 413, 415)


def _drop_unused_schemas(page: dict[str, Any]) -> None:
    """Those of FastAPI's 422, and of classes whose fields have a schema of their own."""
    schemas = page["components"]["schemas"]

    def is_used(name: str) -> bool:
        return f'"#/components/schemas/{name}"'.encode() in orjson.dumps(page)

    while unused := [name for name in schemas if not is_used(name)]:
        for name in unused:
            del schemas[name]


class DescribedApp(FastAPI):
    """FastAPI with a page that knows of our own reading of bodies, and of what any route may answer."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            page = super().openapi()
            error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}}
            for path, operations in page["paths"].items():
                for operation in operations.values():
                    responses = operation["responses"]
                    responses.pop("422", None)  # FastAPI's, for bodies that it would read
                    responses["500"] = {"description": "a fault of the server", **error}
                    if path not in OPEN_PATHS:
                        responses["401"] = {"description": "where the server has a key: it was not sent", **error}
            _drop_unused_schemas(page)
        return super().openapi()
