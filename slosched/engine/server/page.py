"""The page at /: live charts, and a form that shows each token of a request by its deadline."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, Response

_PAGE = Path(__file__).with_name("page.html")
_HEADERS = {
    # The page holds its own script and style, and asks nobody but this server.
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "cache-control": "no-cache",
}


async def answer_page(_http: HTTPRequest) -> Response:
    return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers=_HEADERS)
