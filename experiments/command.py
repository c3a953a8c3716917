"""Parts that the experiments' command lines share: help, `report`, errors and provenance."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import typer

from slosched.cli.console import complain, console
from slosched.core import SloschedError
from slosched.evaluate.capacity.code import git_hash, tree_digest


def make_app(doc: str | None) -> typer.Typer:
    """Make a command line whose help begins with `doc`, the docstring of its module."""
    return typer.Typer(
        help=doc, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
    )


def add_report(
    app: typer.Typer, experiment: str, page: Path, write: Callable[[], object]
) -> Callable[[], None]:
    """Add the command `report`, in which `write` makes the page, and return that command.

    Call it after a run as well, to make the page of the new results.
    """

    def report() -> None:
        write()
        console.print(f"wrote {page} and its figures")

    report.__doc__ = (
        f"Make {page.parent.name}/{page.name} and its figures of the committed results.\n\n"
        f"Example: `python -m experiments.{experiment} report`."
    )
    app.command()(report)
    return report


def start(app: typer.Typer) -> None:
    """Run the command that was typed; an error ends it with one line and status 1."""
    try:
        app()
    except (SloschedError, ValueError, OSError) as error:
        complain(error)
        raise SystemExit(1) from error


def provenance(experiment: str) -> dict[str, object]:
    """Return the provenance of a result: code, command, machine and date."""
    return {
        "git_hash": git_hash(),
        "code_digest": tree_digest()[:16],
        "command": shlex.join(["python", "-m", f"experiments.{experiment}", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }
