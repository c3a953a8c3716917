"""The console that all commands print to, and its tables, progress bars and error lines."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_WIDTH_IN_A_FILE = 100
_NOT_THE_USERS = (
    "<",  # frozen modules
    f"{Path(__file__).parents[1]}{os.sep}",
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib")),
)
"""The beginnings of the file names of slosched, Python and installed libraries."""
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)

# Without emoji=False, rich turns the `:X:` of package.module:X: into an emoji.
console = Console(highlight=False, emoji=False)
if not console.is_terminal:
    console = Console(highlight=False, emoji=False, width=_WIDTH_IN_A_FILE)
_stderr = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def complain(error: Exception) -> None:
    """Print one line to stderr that says what was wrong."""
    _stderr.print(f"[bold red]error:[/] {escape(what(error))}")


def place_in_users_code(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's own code, usually a policy, in the traceback."""
    # A worker process sends its traceback as text, which becomes the cause.
    far = [
        traceback.FrameSummary(f, int(n), at) for f, n, at in _FRAME.findall(str(error.__cause__))
    ]
    frames = [*traceback.extract_tb(error.__traceback__), *far]
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(_NOT_THE_USERS)
        and not frame.filename.endswith(".pyx")  # Cython names no folder, as numpy's files
    ]
    return own[-1] if own else None


def what(error: BaseException) -> str:
    """Return what to tell the user about an error.

    If it came from the user's own code, the file and line come first. Errors of the operating
    system are shown without their number.
    """
    if (place := place_in_users_code(error)) is not None:
        where = f"{place.filename}, line {place.lineno}, in {place.name}"
        return f"{where}: {type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}"
    return str(error)


def progress_bar() -> Progress:
    """Return a progress bar that counts work and estimates the time that is left."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=console,
    )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose first column is a name and whose other columns are numbers."""
    made = Table(title=escape(title), title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        is_name = i == 0
        made.add_column(
            column,
            justify="left" if is_name else "right",
            overflow="fold" if is_name else "ellipsis",  # the end of a name tells it from others
        )
    for row in rows:
        made.add_row(*map(escape, row))
    return made
