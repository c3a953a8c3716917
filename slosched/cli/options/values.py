"""The values of options: how texts are read, and what help texts show."""

from __future__ import annotations

import math
from collections.abc import Container
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from slosched.workload import (
    Adapters,
    TTFTPromise,
    parse_adapters,
    parse_duration,
    parse_promised,
    parse_ttft,
)

_HTTP = ("http", "https")
_FIGURES = (".png", ".svg", ".pdf", ".jpg")


def duration(text: str, *, may_be_zero: bool = False) -> float:
    """Return seconds; raise BadParameter, which typer shows with the option's name."""
    try:
        return parse_duration(text, may_be_zero=may_be_zero)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def promised(text: str) -> float:
    """Return the seconds of a promise; raise BadParameter, also for 50, which may mean 50ms."""
    try:
        return parse_promised(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def ttft(text: str) -> TTFTPromise:
    """Return a TTFT promise; raise BadParameter, which typer shows with the option's name."""
    try:
        return parse_ttft(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def adapters(text: str) -> Adapters:
    """Return LoRA adapters; raise BadParameter, which typer shows with the option's name."""
    try:
        return parse_adapters(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


class Seconds(float):
    """A default value in seconds that help texts show with its unit."""

    def __str__(self) -> str:
        return f"{self:g}s"


def share(text: str) -> float:
    """Return a share in (0, 1]; raise BadParameter for anything else, such as percent."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise typer.BadParameter(f"{text!r} is no share in (0, 1], as 0.9 for 90 %")
    return value


def writable(path: Path | None) -> Path | None:
    """Return the path; raise BadParameter if it cannot be written, before any work is done."""
    if path is None:
        return None
    whole = path.absolute()
    there = next(place for place in (whole, *whole.parents) if place.exists())
    if there != whole and not there.is_dir():
        raise typer.BadParameter(f"{str(path)!r} is in no folder: {there} exists and is a file")
    try:
        _try_to_write(there)
    except OSError as error:
        raise typer.BadParameter(
            f"{str(path)!r} cannot be written: {there} takes nothing new ({error.strerror}); name "
            "another place"
        ) from error
    return path


def _try_to_write(path: Path) -> None:
    """Raise OSError if a file cannot be added to, or nothing can be made in a folder.

    Permissions do not tell: root has those for /proc, which takes nothing.
    """
    if path.is_dir():
        TemporaryDirectory(prefix=".slosched-", dir=path).cleanup()
    elif path.is_file():
        path.open("ab").close()


def check_other_file(out: Path, source: Path, what: str, flag: str = "--out") -> None:
    """Raise ValueError if `out`, given by `flag`, is the file `source`: `what` is read."""
    if out.exists() and source.exists() and out.samefile(source):
        raise ValueError(f"{flag} {out} is {what} itself: name another file")


def check_two_files(path: Path, other: Path, flag: str) -> None:
    """Raise ValueError if `path`, given by `flag`, is also where --out writes `other`."""
    if path.resolve() == other.resolve():
        raise ValueError(f"{flag} {path} is written by --out, too: name another file")


def figure(path: Path | None) -> Path | None:
    """Return the path; raise BadParameter if a figure cannot be written there under this name."""
    if path is not None and path.suffix not in _FIGURES:
        raise typer.BadParameter(f"{str(path)!r} must end in {', '.join(_FIGURES)}")
    return writable(path)


def server_url(url: str | None) -> str | None:
    """Return the address without a slash at its end; raise BadParameter if it cannot be one."""
    if url is None:
        return None
    if not _is_address(url, _HTTP):
        raise typer.BadParameter(f"{url!r} is no address of a server; write http://host:port")
    base = url.rstrip("/")
    if base.endswith("/v1"):
        raise typer.BadParameter(f"{url!r}: leave out /v1, which is a part of each request's path")
    return base


def collector_url(url: str | None) -> str | None:
    """Return the address; raise BadParameter if no spans can be sent there."""
    if url is not None and not _is_address(url, (*_HTTP, "grpc")):
        raise typer.BadParameter(
            f"{url!r} is no address of a collector; write http://localhost:4317"
        )
    return url


def _is_address(url: str, schemes: Container[str]) -> bool:
    """Tell whether this address has one of the schemes, a host, and no port beyond 65535."""
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # what urllib says does not name the address
        return False


def out_file(what: str) -> Any:
    """Return the option --out for the file that a command writes; `what` is its help text."""
    return typer.Option("--out", "-o", dir_okay=False, callback=writable, help=what)


def first_key(keys: str | None) -> str | None:
    """Return the first of the keys that SLOSCHED_API_KEY has for a server, or None."""
    return next(iter((keys or "").split()), None)


ServerKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="SLOSCHED_API_KEY",
        callback=first_key,
        help="The key of a running server that asks for one, the first of several.",
    ),
]


def is_given(context: typer.Context, name: str) -> bool:
    """Tell whether the user gave this option on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_heeded(context: typer.Context, flag: str, heeded: Container[str]) -> None:
    """Raise ValueError if more is given than the options that have an effect beside `flag`."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in heeded and is_given(context, name):
            told = parameter.opts[0] if parameter.param_type_name == "option" else "a model"
            raise ValueError(f"{told} has no effect beside {flag}: leave one of them out")


OutDir = Annotated[
    Path,
    typer.Option("--out", "-o", file_okay=False, callback=writable, help="Folder for the results."),
]
Figures = Annotated[
    bool,
    typer.Option(
        help="Whether to draw figures.  Of a short replay that takes longer than all the rest."
    ),
]
