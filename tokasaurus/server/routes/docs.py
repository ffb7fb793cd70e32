"""GET /docs, the page about the API, and the files that it loads. Nothing comes from another host."""

import hashlib
from functools import cache

from fastapi import APIRouter, Request
from starlette.responses import Response

from tokasaurus.server.docs_page import ASSETS, read_asset, read_docs_page
from tokasaurus.server.errors import NotFound, shorten
from tokasaurus.server.page_headers import page_headers

router = APIRouter(include_in_schema=False)


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers."""
    content = read_docs_page()
    return content, page_headers(content, "'self'", "'self' 'unsafe-inline'")


@cache
def _asset(name: str, compressed: bool) -> tuple[bytes, dict[str, str]]:
    content = read_asset(name, compressed)
    headers = {"Cache-Control": "no-cache", "Vary": "Accept-Encoding", "X-Content-Type-Options": "nosniff"}
    headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return content, {**headers, "Content-Encoding": "gzip"} if compressed else headers


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The routes and their fields, with bodies to try. The page needs no key: it asks for one, and sends it with its
    own requests."""
    content, headers = _page()
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type="text/html")


@router.get("/docs/{name}")
async def docs_asset(request: Request, name: str) -> Response:
    """A file that /docs loads."""
    if name not in ASSETS:
        raise NotFound(f"the page /docs has no file {shorten(name)!r}", "name")
    content, headers = _asset(name, "gzip" in request.headers.get("accept-encoding", ""))
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=ASSETS[name])
