"""Tables for the pages that experiments make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(
    heads: Sequence[object], rows: Iterable[Sequence[object]], num_texts: int | None = None
) -> str:
    """Return a table.  Columns after the first `num_texts` hold numbers, aligned to the right.

    A bar in a cell becomes a slash, since it would end the cell.
    """
    of_texts = len(heads) if num_texts is None else num_texts
    rule = "|---" * of_texts + "|---:" * (len(heads) - of_texts) + "|"
    return "\n".join([_line(heads), rule, *map(_line, rows)])


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"
