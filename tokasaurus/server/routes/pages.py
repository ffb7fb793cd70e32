"""The live page at / and the page about the API at /docs. Nothing that they load comes from another host."""

import base64
import hashlib
import re
from functools import cache

from fastapi import APIRouter, Request
from starlette.responses import Response

from tokasaurus.server.docs_page import ASSETS, read_asset, read_docs_page
from tokasaurus.server.errors import NotFound, shorten
from tokasaurus.server.page import read_live_page

# A script that is written in the page; one with a source has no text.
_SCRIPT = re.compile(rb"<script(?:\s[^>]*)?>(.*?)</script>", re.DOTALL | re.IGNORECASE)


def content_policy(page: bytes, other_scripts: str = "", styles: str = "'unsafe-inline'") -> str:
    """Allows the scripts that are written in the page, its styles, and requests to its own server; nothing else.

    other_scripts, styles: sources in the policy's own words."""
    written = filter(None, _SCRIPT.findall(page))
    digests = (base64.b64encode(hashlib.sha256(script).digest()).decode() for script in written)
    scripts = " ".join([*([other_scripts] if other_scripts else []), *(f"'sha256-{digest}'" for digest in digests)])
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {scripts}",
            f"style-src {styles}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def page_headers(page: bytes, other_scripts: str = "", styles: str = "'unsafe-inline'") -> dict[str, str]:
    """Headers of this page. Arguments: see `content_policy`."""
    return {
        "Content-Security-Policy": content_policy(page, other_scripts, styles),
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(page).hexdigest()[:32]}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


router = APIRouter(include_in_schema=False)


@cache
def _live_page() -> tuple[bytes, dict[str, str]]:
    content = read_live_page()
    return content, page_headers(content)


@cache
def _docs_page() -> tuple[bytes, dict[str, str]]:
    content = read_docs_page()
    return content, page_headers(content, "'self'", "'self' 'unsafe-inline'")


@cache
def _asset(name: str, compressed: bool) -> tuple[bytes, dict[str, str]]:
    content = read_asset(name, compressed)
    headers = {"Cache-Control": "no-cache", "Vary": "Accept-Encoding", "X-Content-Type-Options": "nosniff"}
    headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return content, {**headers, "Content-Encoding": "gzip"} if compressed else headers


def _answer(request: Request, content: bytes, headers: dict[str, str], media_type: str = "text/html") -> Response:
    """The content, unless the browser has it."""
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media_type)


@router.get("/")
async def page(request: Request) -> Response:
    """The live page. It needs no key: it asks for one, and sends it with its own requests."""
    return _answer(request, *_live_page())


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The routes and their fields, with bodies to try. The page needs no key: it asks for one, and sends it with its
    own requests."""
    return _answer(request, *_docs_page())


@router.get("/docs/{name}")
async def docs_asset(request: Request, name: str) -> Response:
    """A file that /docs loads."""
    if name not in ASSETS:
        raise NotFound(f"the page /docs has no file {shorten(name)!r}", "name")
    return _answer(request, *_asset(name, "gzip" in request.headers.get("accept-encoding", "")), ASSETS[name])
