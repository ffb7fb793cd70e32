"""The page at /docs: Swagger UI 5.35.0 (the npm package swagger-ui-dist, Apache-2.0), unchanged but compressed.

Knows: the names of its files. Does not know how the server serves them, nor what the API is.
"""

import gzip
from pathlib import Path

_FOLDER = Path(__file__).parent

ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
"""Name of each file that the page loads → its type."""


def read_docs_page() -> bytes:
    """The page as UTF-8."""
    return (_FOLDER / "docs.html").read_bytes()


def read_asset(name: str, compressed: bool) -> bytes:
    """One of ASSETS. compressed: by gzip."""
    content = (_FOLDER / f"{name}.gz").read_bytes()
    return content if compressed else gzip.decompress(content)
