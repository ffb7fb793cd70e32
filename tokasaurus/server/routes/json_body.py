"""Routes whose JSON body we read ourselves.

FastAPI's own reading answers 500 to a lone surrogate and lets NaN through; orjson refuses both, and nesting deeper than
1,024. The endpoint still declares its body's model, so that the OpenAPI page shows it.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast, get_type_hints

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from tokasaurus.server.errors import ClientGone, InvalidRequest, invalid_body
from tokasaurus.server.state import state_of

Body = TypeVar("Body", bound=BaseModel)

# A body of this many bytes is parsed in under a millisecond; a larger one leaves the event loop.
_MAX_INLINE_BYTES = 32_768


def parse_body(content: bytes, body_model: type[Body]) -> Body:
    """Raises InvalidRequest for whatever is no JSON object of the model's fields."""
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error.msg} (character {error.pos})") from None
    try:
        return body_model.model_validate(value)
    except ValidationError as error:
        raise invalid_body(error) from None


class JsonBodyRoute(APIRoute):
    """For endpoints `async def endpoint(request: Request, body: SomeModel) -> Response`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = cast(Callable[[Request, BaseModel], Awaitable[Response]], self.endpoint)
        body_model: type[BaseModel] = get_type_hints(self.endpoint)["body"]

        async def handle(request: Request) -> Response:
            try:
                content = await request.body()
            except ClientDisconnect:
                raise ClientGone from None
            if len(content) <= _MAX_INLINE_BYTES:
                body = parse_body(content, body_model)
            else:
                body = await state_of(request).in_text_thread(parse_body, content, body_model)
            return await endpoint(request, body)

        return handle
