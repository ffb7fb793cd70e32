"""Routes whose JSON body we parse ourselves. The endpoint still declares its body's model, so that the OpenAPI page
shows it.

The content-type is not asked: many clients send JSON as a form or as text, as `curl -d` does. A browser sends those
without asking the server first, so a page of another site is refused before (`CrossSiteMiddleware`)."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from tokasaurus.config import ServerConfig
from tokasaurus.server.errors import BodyTooLarge, ClientGone, NotJson, UnsupportedMediaType, shorten
from tokasaurus.server.json_values import Body, is_parsed_quickly, parse_body
from tokasaurus.server.protocol.fields import OptionalObject
from tokasaurus.server.state import state_of


class JsonBodyRoute(APIRoute):
    """For endpoints `async def endpoint(request: Request, body: SomeModel) -> Response`; others are as usual."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = cast(Callable[[Request, BaseModel], Awaitable[Response]], self.endpoint)
        body_model: type[BaseModel] | None = get_type_hints(self.endpoint).get("body")
        if body_model is None:
            return super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                # a call of its own: the content's memory is free while the endpoint runs
                body = await _read_and_parse(request, body_model)
            except NotJson as error:
                named = request.headers.get("content-type", "")
                if "json" in named.lower() or not named:
                    raise
                raise UnsupportedMediaType(
                    f"the body must be JSON, whatever its content-type, which is {shorten(named)!r}: {error.message}"
                ) from None
            return await endpoint(request, body)

        return handle


async def _read_and_parse(request: Request, body_model: type[Body]) -> Body:
    """Also notes the body's size, see `num_body_bytes`."""
    state = state_of(request)
    with state.body_bytes.of_one_body() as count:
        content = await _read(request, state.config, count)
        request.state.num_body_bytes = len(content)
        if not content and issubclass(body_model, OptionalObject):
            return body_model()
        if is_parsed_quickly(content):
            return parse_body(content, body_model, state.config.max_json_values)
        threads, max_values = state.text_threads, state.config.max_json_values
        return await threads.run(len(content), parse_body, content, body_model, max_values)


async def _read(request: Request, config: ServerConfig, count: Callable[[int], None]) -> bytearray:
    """The whole body. Raises BodyTooLarge as soon as a limit is exceeded, what `count` raises, and ClientGone.

    count: called with the size of each part, before the part is kept.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal():
        _check_size(int(announced), config)
    content = bytearray()
    try:
        async for chunk in request.stream():
            _check_size(len(content) + len(chunk), config)
            count(len(chunk))
            content += chunk
    except ClientDisconnect:
        raise ClientGone from None
    return content


def _check_size(num_bytes: int, config: ServerConfig) -> None:
    limit = config.max_body_bytes_in_all if config.max_request_bytes is None else config.max_request_bytes
    if num_bytes > limit:
        raise BodyTooLarge(f"the body may have at most {limit} bytes (max_request_bytes)")
