"""A server behind a proxy that offers it below a path."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class UnderRootPath:
    """Middleware that takes `root_path` off the paths of requests.

    Paths without it stay as they are, so that it does not matter whether the proxy takes it off,
    and health checks can come without the proxy.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root_path}/"):
            num_chars, raw_path = len(self._root_path), scope.get("raw_path")
            scope = {**scope, "path": scope["path"][num_chars:]}
            if raw_path is not None:
                scope["raw_path"] = raw_path.removeprefix(self._root_path.encode())
        await self._app(scope, receive, send)
