"""Exceptions for user mistakes and server states, and the handlers that answer them with OpenAI's error object."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from tokasaurus.server.paths import closest_path, methods_at, of_other_server, paths_of
from tokasaurus.server.value_words import MAX_ECHO_CHARS, told_together, words_for
from tokasaurus.text.json_lines import write_json


@dataclass(frozen=True, slots=True)
class ErrorObject:
    message: str
    type: str
    param: str | None
    code: str | None


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """The body of every response with status 400 or above."""

    error: ErrorObject


class ApiError(Exception):
    """Answered with `status`, `headers` and an OpenAI error object. A subclass states what differs from its base.

    param: the request field that is wrong.
    """

    status = 500
    type = "server_error"
    code: str | None = None
    headers: Mapping[str, str] = {}

    def __init_subclass__(
        cls,
        *,
        status: int | None = None,
        type: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        for name, value in (("status", status), ("type", type), ("code", code), ("headers", headers)):
            if value is not None:
                setattr(cls, name, value)

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def as_object(self) -> ErrorObject:
        return ErrorObject(self.message, self.type, self.param, self.code)


class InvalidRequest(ApiError, status=400, type="invalid_request_error", code="invalid_value"):
    pass


class ServiceUnavailable(ApiError, status=503, type="service_unavailable"):
    pass


class TooMany(ApiError, status=429, type="rate_limit_error", headers={"Retry-After": "1"}):
    pass


class Unsupported(InvalidRequest, code="unsupported_value"):
    """A value that OpenAI or another server allows, and this one does not implement."""


class UnsupportedField(Unsupported, code="unsupported_parameter"):
    """A known field that is not implemented, with a value other than its neutral ones."""


class UnknownField(InvalidRequest, code="unknown_parameter"):
    pass


class MissingField(InvalidRequest, code="missing_required_parameter"):
    pass


class WrongType(InvalidRequest, code="invalid_type"):
    pass


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """Prompt and completion together are longer than the model's context, the KV cache or the flag allows."""


class WrongTask(InvalidRequest, code="wrong_task"):
    """The served model does something else; the message says what, and where."""


class GrammarTooComplex(InvalidRequest, code="grammar_too_complex"):
    """The grammar passed validation, but exceeded a limit in the engine, which aborted a sequence."""


class NumericalError(ApiError, code="numerical_error"):
    """The model computed NaN or infinity for the request."""


class AnswerTooLargeError(InvalidRequest, code="answer_too_large"):
    """An answer that is not streamed grew beyond the limit of what is kept in memory; it was cancelled."""


class ModelNotFound(InvalidRequest, status=404, code="model_not_found"):
    def __init__(self, name: str) -> None:
        super().__init__(f"the model {shorten(name)!r} does not exist; GET /v1/models lists what is served", "model")


class NotFound(InvalidRequest, status=404, code="not_found"):
    """No file or batch has the id."""


class Conflict(InvalidRequest, status=409, code="conflict", headers={"x-should-retry": "false"}):
    """The file or batch is in a state that does not allow it. OpenAI's clients would try it again."""


class WrongApiKey(InvalidRequest, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}):
    pass


class BodyTooLarge(InvalidRequest, status=413, code="request_too_large", headers={"Connection": "close"}):
    """The rest of the body is not read, so the connection cannot be reused."""


class NotJson(InvalidRequest):
    """The body is no JSON."""


class TooManyValues(InvalidRequest, code="too_many_values"):
    """The body has so many numbers, strings, lists and objects that parsing it would block all other requests."""


class MalformedHttp(InvalidRequest, code="malformed_request"):
    """The bytes are no valid HTTP request."""


class UrlTooLong(InvalidRequest, status=414, code="url_too_long"):
    pass


class HeadersTooLarge(InvalidRequest, status=431, code="headers_too_large"):
    pass


class RequestTimedOut(InvalidRequest, status=408, code="request_timeout"):
    """The client sends its request too slowly."""


class MisdirectedRequest(InvalidRequest, status=421, code="misdirected_request"):
    """The Host header names another server."""


class CrossSite(InvalidRequest, status=403, code="cross_site_request"):
    """A web page of a site that is not allowed made a browser send the request."""


class UnsupportedMediaType(InvalidRequest, status=415, code="unsupported_media_type"):
    pass


class UnsupportedEncoding(UnsupportedMediaType, headers={"Accept-Encoding": "gzip, deflate"}):
    """The body is compressed in a way that is not known here. The header: RFC 7694."""


class QueueFull(TooMany, code="queue_full"):
    pass


class TooManyConnections(TooMany, code="too_many_connections"):
    pass


class TooManyBodies(ServiceUnavailable, code="too_many_bodies", headers={"Retry-After": "1", "Connection": "close"}):
    """The bodies being received take all the memory they may. The rest is not read, as with BodyTooLarge."""


class DataDirMissing(ApiError, status=501, type="invalid_request_error", code="data_dir_missing"):
    """Files and batches are not available on this server."""


class StorageFailed(ApiError, code="storage_failed"):
    """The data directory cannot be read or written."""


class StorageIsFull(StorageFailed, status=507, code="storage_full"):
    pass


class EngineNotReady(ServiceUnavailable, code="engine_not_ready"):
    pass


class GrammarValidatorFailed(ServiceUnavailable, code="grammar_validator_failed", headers={"Retry-After": "1"}):
    """The processes that validate grammars were killed or did not answer, twice; the grammar may be valid."""


class TemplateRendererFailed(ServiceUnavailable, code="template_renderer_failed", headers={"Retry-After": "1"}):
    """The process that renders the chat templates of requests could not start."""


class EngineAsleep(ServiceUnavailable, code="engine_asleep"):
    """New requests are refused while the engine sleeps."""


class EngineRestarting(ServiceUnavailable, code="engine_restarting", headers={"Retry-After": "5"}):
    pass


class RequestAborted(ServiceUnavailable, code="aborted", headers={"Retry-After": "1"}):
    """The client of roll-outs has aborted all requests, and this one had nothing to return yet."""


class EngineDied(ApiError, code="engine_died"):
    """The engine died during the request, which cannot be run again: a part of its answer is sent, or it died often."""


class ServerStopping(ServiceUnavailable, code="server_stopping", headers={"Retry-After": "5"}):
    pass


class ClientGone(Exception):
    """The client closed its connection: nobody reads the response."""


def shorten(text: str) -> str:
    return text if len(text) <= MAX_ECHO_CHARS else text[:MAX_ECHO_CHARS] + "…"


def internal_error() -> ApiError:
    """Stands for an error of our own, whose traceback is in the log."""
    return ApiError("internal error; the server's log has the details")


def invalid_value(details: ErrorDetails) -> InvalidRequest:
    """For one of the errors that pydantic found, with its context and the field's name; not for an unknown field."""
    param = field_name(details["loc"])
    match details["type"]:
        case "missing":
            return MissingField(f"{param} is required", param)
        case "not_implemented":
            return Unsupported(f"{param} {details['msg']}", param)
        case "field_not_implemented":
            return UnsupportedField(f"{param} {details['msg']}", param)
        case "value_not_allowed":  # messages of our own validators follow the field's name
            return InvalidRequest(f"{param} {details['msg']}", param)
        case "model_type" | "dataclass_type" if param is None:
            return WrongType("the body must be a JSON object")
    kind = WrongType if details["type"].endswith("_type") else InvalidRequest
    return kind(f"{'the body' if param is None else param} {words_for(details)}", param)


def field_name(location: Sequence[int | str]) -> str | None:
    """("messages", 0, "role") -> "messages[0].role"; None for the body itself."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{shorten(part)}"
    return name.removeprefix(".") if location else None


def unknown_field(name: str, advice: str = "") -> UnknownField:
    """advice: what may be meant, to be read after the name."""
    return UnknownField(f"unknown field {name!r}{advice}", name)


def one_error(problems: Sequence[InvalidRequest], num_more: int = 0) -> InvalidRequest:
    """All problems of a body in one error, which is of the kind of the first and names its field.

    num_more: how many there are beside `problems`."""
    first = problems[0]
    return type(first)(told_together([problem.message for problem in problems], num_more), first.param)


def error_response(error: ApiError) -> Response:
    return _respond(error.status, error.as_object(), error.headers)


def add_error_handlers(app: FastAPI) -> None:
    """Give every response with status 400 or above an OpenAI error object as its body."""

    async def on_api_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        """Errors raised by the router: unknown route, wrong method."""
        assert isinstance(error, HTTPException)
        path, status, headers = request.url.path, error.status_code, error.headers
        if status == 405:  # the router names the methods of one route alone
            headers = {"Allow": ", ".join(methods_at(app.router.routes, request.scope))}
        if request.method == "OPTIONS" and (status == 405 or request.scope["path"] == "*"):
            return Response(status_code=204, headers=headers)  # RFC 9110, section 9.3.7
        route = f"{request.method} {shorten(path)}"
        message, code = str(error.detail), None
        known = paths_of(app.router.routes)
        advice = of_other_server(path, known)
        if status == 405 and advice is None:
            message = f"method not allowed: {route}"
        elif status in (404, 405):  # a route may have the path of another server's by its parameter
            status, code, headers = 404, "unknown_url", None  # as OpenAI names it
            advice = advice or closest_path(path, known)
            message = f"unknown route: {route}" if advice is None else f"unknown route: {route}: {advice}"
        return _respond(status, ErrorObject(message, "invalid_request_error", None, code), headers)

    async def on_client_gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=499)  # nginx's status for a closed connection; nobody reads it

    async def on_internal_error(_request: Request, _error: Exception) -> Response:
        # Starlette re-raises the error after this response, so the server's log gets the traceback.
        return error_response(internal_error())

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGone, on_client_gone)
    app.add_exception_handler(Exception, on_internal_error)


def _respond(status: int, error: ErrorObject, headers: Mapping[str, str] | None) -> Response:
    content = write_json(ErrorResponse(error))
    return Response(content, status_code=status, headers=headers, media_type="application/json")
