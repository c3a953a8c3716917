"""What the deployment that clients reach refuses by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: pip install 'slosched[ray]'")

from starlette.requests import Request as HTTPRequest

from slosched.gateway.ray_serve.front import Front


class Nobody:
    """The handle of a deployment that is not to be asked."""

    def options(self, **_options: Any) -> Nobody:
        return self


@pytest.mark.filterwarnings("ignore")  # warnings from Ray itself
def test_a_body_that_takes_long_to_parse_is_refused() -> None:
    """The routers would parse it, and each handle has one, which answers nobody meanwhile."""
    content = b'{"x": [%b[]]}' % (b"[]," * 40_000)

    async def receive() -> Any:
        return {"type": "http.request", "body": content, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    response = asyncio.run(Front(Nobody())(HTTPRequest(scope, receive)))
    assert response.status_code == 413
    assert b"body_too_large" in response.body
