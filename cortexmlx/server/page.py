"""The page at `/`: one file without data, and the headers that keep it from loading or running anything else."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

_FILE = "index.html"


@cache
def _page() -> tuple[bytes, str]:
    """Return the file, and its content security policy: only its own script and styles, and only this server."""
    text = files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    rules = [
        "default-src 'none'",
        f"script-src {_hashes('script', text)}",
        f"style-src {_hashes('style', text)}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return text.encode(), "; ".join(rules)


def _hashes(tag: str, text: str) -> str:
    """Return what allows the inline elements of a tag."""
    inside = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in inside)


def wants_page(request: Request) -> bool:
    """Return whether who asks is a browser, and no program such as curl."""
    return "text/html" in request.headers.get("accept", "")


def page() -> Response:
    """Return the page."""
    content, policy = _page()
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": policy,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "vary": "accept",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }
    return Response(content, headers=headers, media_type="text/html")
