"""Tables for the pages that experiments make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """One line a row; a bar within a cell would end it, so that it becomes a slash."""
    return "\n".join([_line(columns), "|---" * len(columns) + "|", *map(_line, rows)])


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"
