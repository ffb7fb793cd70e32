"""GET /, the live page, and GET /live, its events."""

import base64
import hashlib
import re
from functools import cache

from fastapi import APIRouter, Request
from starlette.responses import Response

from tokasaurus.server.errors import ServerStopping
from tokasaurus.server.live import LiveFeed
from tokasaurus.server.page import read_live_page
from tokasaurus.server.routes.event_stream import HEADERS, EventStream
from tokasaurus.server.state import is_head, state_of

router = APIRouter(tags=["health"])

_SCRIPT = re.compile(rb"<script(?:\s[^>]*)?>(.*?)</script>", re.DOTALL | re.IGNORECASE)


def content_policy(page: bytes) -> str:
    """Allows the scripts that are written in the page, its styles, and requests to its own server; nothing else."""
    digests = (base64.b64encode(hashlib.sha256(script).digest()).decode() for script in _SCRIPT.findall(page))
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {scripts}",
            "style-src 'unsafe-inline'",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers."""
    content = read_live_page()
    return content, {
        "Content-Security-Policy": content_policy(content),
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """The live page. It needs no key: it asks for one, and sends it with its own requests."""
    content, headers = _page()
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type="text/html")


@router.get("/live", include_in_schema=False)
async def live(request: Request) -> Response:
    """Server-sent events, one a second, whatever the state of the engine, until the server stops."""
    if state_of(request).engine.is_draining:
        raise ServerStopping("the server is stopping")
    if is_head(request.scope):
        return Response(media_type=EventStream.media_type, headers=HEADERS)
    feed: LiveFeed = request.app.state.live
    return EventStream(feed.listen())
