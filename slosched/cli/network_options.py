"""The options of `serve` for how clients reach it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slosched.cli import options

if TYPE_CHECKING:
    from slosched.engine.server import TLSFiles


class LogLevel(StrEnum):
    """The levels of uvicorn's log."""

    CRITICAL = "critical"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"
    TRACE = "trace"


@dataclass(frozen=True)
class NetworkOptions:
    """How clients reach a server, under vLLM's names where vLLM has them."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000
    ssl_keyfile: Annotated[
        Path | None, typer.Option(help="PEM file of the private key, to serve HTTPS.")
    ] = None
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="PEM file of the certificate, to serve HTTPS.")
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let web pages of this origin use the server (CORS): https://chat.example.com, or "
            "* for all.  May be repeated, or be a JSON list as in vLLM.",
        ),
    ] = None
    root_path: Annotated[
        str, typer.Option(metavar="PATH", help="The path at which a proxy offers the server: /llm.")
    ] = ""
    request_timeout: Annotated[
        float | None,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="End a request that is not finished after this time, with an error: 5m.",
        ),
    ] = None
    max_concurrent_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Answer 503 to requests for text while so many are being answered.  "
            "Default: no limit, since policies refuse what would be late.",
        ),
    ] = None
    uvicorn_log_level: Annotated[LogLevel, typer.Option(help="Level of the HTTP server's log.")] = (
        LogLevel.WARNING
    )

    def tls(self) -> TLSFiles | None:
        """Return the files for HTTPS, or None; raise CertificateError if they cannot be used."""
        from slosched.engine.server import TLSFiles  # starlette and uvicorn are an extra

        if self.ssl_certfile is None and self.ssl_keyfile is None:
            return None
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            raise ValueError("HTTPS needs both --ssl-certfile and --ssl-keyfile")
        files = TLSFiles(self.ssl_certfile, self.ssl_keyfile)
        files.check()
        return files

    def origins(self) -> tuple[str, ...]:
        """Return the allowed origins; raise ValueError for JSON that is no list of texts."""
        origins: list[str] = []
        for text in self.allowed_origins or ():
            found = _json_list(text) if text.lstrip().startswith("[") else [text]
            origins += found
        return tuple(origins)


def _json_list(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f'--allowed-origins takes an origin or a list ["a", "b"], not {text!r}')
    return found
