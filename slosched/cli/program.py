"""The `slosched` command: runs the commands and prints errors as one line."""

from __future__ import annotations

import logging
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

import slosched
from slosched.cli.lazy import LazyCommands, add_summaries

app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    rich_markup_mode=None,  # drawing frames would double the start-up time
    pretty_exceptions_enable=False,
    help="SLO-aware scheduling of LLM inference: profile, fit, serve, replay, compare.",
)
add_summaries(app)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"slosched {slosched.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        # Eager: needs no command.
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def run() -> None:
    """Run the command line.

    Errors that a user can mend, which are bad input, more of it than memory holds, and errors in
    the user's own policy, become one line on stderr and exit status 1. Any other error is a bug of
    slosched and keeps its traceback.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("slosched").setLevel(logging.INFO)  # slow work announces itself
    if isinstance(sys.stdout, TextIOWrapper):  # `÷` in ASCII must not end a long run at its table
        sys.stdout.reconfigure(errors="replace")
    sys.path.append(str(Path.cwd()))  # for --policy package.module:Class
    try:
        app()
    except Exception as error:
        from slosched.cli.console import complain, place_in_users_code
        from slosched.core import SloschedError

        is_input = isinstance(error, SloschedError | ValueError | OSError | MemoryError)
        if not is_input and place_in_users_code(error) is None:
            raise
        complain(error)
        sys.exit(1)
