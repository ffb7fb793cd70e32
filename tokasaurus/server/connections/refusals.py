"""Answers to requests that never reach the application: whole HTTP responses as bytes."""

from collections.abc import Iterable

from starlette.datastructures import Headers
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tokasaurus.server.errors import ApiError, error_response
from tokasaurus.server.request_id import request_id_of


def refusal(
    error: ApiError, request_headers: list[tuple[bytes, bytes]], default: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """The response to a request of which only `request_headers` may be known; afterwards the connection must close.

    default: headers of every response.
    """
    response = error_response(error)
    own_id = request_id_of(Headers(raw=request_headers)).encode()
    headers = [*default, *response.raw_headers, (b"x-request-id", own_id), (b"connection", b"close")]
    lines = [name + b": " + value + b"\r\n" for name, value in headers]
    return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", bytes(response.body)])
