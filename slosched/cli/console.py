"""What the commands print with: one console, tables, progress, complaints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

# Without emoji=False rich reads the `:X:` of package.module:X: as a picture.
console = Console(highlight=False, emoji=False)
if not console.is_terminal:
    console = Console(highlight=False, emoji=False, width=_WIDTH_IN_A_FILE)
_stderr = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def complain(error: Exception) -> None:
    """One line that says what was wrong."""
    _stderr.print(f"[bold red]error:[/] {escape(_what(error))}")


def _what(error: Exception) -> str:
    """The system's own errors without their number, the file first."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def progress_bar() -> Progress:
    """Counted work, with the time that it still takes."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=console,
    )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """The first column is a name, the others are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        is_name = i == 0
        made.add_column(
            column,
            justify="left" if is_name else "right",
            overflow="fold" if is_name else "ellipsis",  # a name is told apart by its end
        )
    for row in rows:
        made.add_row(*map(escape, row))
    return made
