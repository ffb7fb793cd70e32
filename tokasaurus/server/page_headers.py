"""Headers of the server's own web pages."""

import base64
import hashlib
import re

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
    """Headers of this page. The arguments are those of `content_policy`."""
    return {
        "Content-Security-Policy": content_policy(page, other_scripts, styles),
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(page).hexdigest()[:32]}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
