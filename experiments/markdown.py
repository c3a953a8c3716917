"""Tables for the pages that experiments make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(
    heads: Sequence[object], rows: Iterable[Sequence[object]], num_texts: int | None = None
) -> str:
    """One line a row.  Columns after the first `num_texts` hold numbers, which end on the right.

    A bar within a cell would end it, so that it becomes a slash.
    """
    of_texts = len(heads) if num_texts is None else num_texts
    rule = "|---" * of_texts + "|---:" * (len(heads) - of_texts) + "|"
    return "\n".join([_line(heads), rule, *map(_line, rows)])


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"
