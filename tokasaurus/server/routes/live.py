"""GET /, the live page, and GET /live, its events."""

from functools import cache

from fastapi import APIRouter, Request
from starlette.responses import Response

from tokasaurus.server.errors import ServerStopping
from tokasaurus.server.event_stream import HEADERS, EventStream
from tokasaurus.server.live import LiveFeed
from tokasaurus.server.openapi import error_responses
from tokasaurus.server.page import read_live_page
from tokasaurus.server.page_headers import page_headers
from tokasaurus.server.protocol.live import LiveEvent
from tokasaurus.server.state import is_head, state_of

router = APIRouter(tags=["health"])


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers."""
    content = read_live_page()
    return content, page_headers(content)


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """The live page. It needs no key: it asks for one, and sends it with its own requests."""
    content, headers = _page()
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type="text/html")


@router.get(
    "/live",
    responses={
        200: {"model": LiveEvent, "description": "Server-sent events, each with `data: ` and one object in a line."},
        **error_responses(503),
    },
)
async def live(request: Request) -> Response:
    """What the server does, once a second, whatever the state of the engine, until the server stops."""
    if state_of(request).engine.is_draining:
        raise ServerStopping("the server is stopping")
    if is_head(request.scope):
        return Response(media_type=EventStream.media_type, headers=HEADERS)
    feed: LiveFeed = request.app.state.live
    return EventStream(feed.listen())
