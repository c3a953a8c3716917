"""The answers to requests that raise an error before or outside of their generation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from slosched.engine.server.errors import ApiError


async def _answer_api_error(_http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _answer_nobody(_http: HTTPRequest, _error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_http_error(http: HTTPRequest, error: Exception) -> Response:
    """Answer a request for an unknown path or method."""
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    if error.status_code == 404 and http.url.path.endswith("/"):
        message += "; no path here ends with a slash"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    response = ApiError(error.status_code, message, code=code).response()
    response.headers.update(error.headers or {})
    return response


async def _answer_bug(_http: HTTPRequest, error: Exception) -> Response:
    """Answer with status 500; Starlette then logs the traceback."""
    message = f"the server failed on this request: {type(error).__name__}"
    return ApiError(500, message, kind="server_error", code="internal_error").response()


EXCEPTION_HANDLERS: Mapping[
    type[Exception], Callable[[HTTPRequest, Exception], Awaitable[Response]]
]
EXCEPTION_HANDLERS = {
    ApiError: _answer_api_error,
    ClientDisconnect: _answer_nobody,
    HTTPException: _answer_http_error,
    Exception: _answer_bug,
}


def refuse_slashes(app: Starlette) -> None:
    """Let paths with a slash too many at their end be unknown, as all others are that `app` lacks.

    Starlette redirects them to an address with the host that the client named, whoever that is, and
    most clients do not send the body of a request again.
    """
    app.router.redirect_slashes = False
