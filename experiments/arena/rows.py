"""Tables as lists of records, with the queries that the page and its figures need."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

Row = dict[str, Any]
Tables = dict[str, list[Row]]
"""Tables by kind of result."""


def pick(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """Return the rows with these values; `class_` stands for the column `class`."""
    wanted = {name.rstrip("_"): value for name, value in wanted.items()}
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def among(rows: Sequence[Row], column: str, values: Sequence[object]) -> list[Row]:
    """Return the rows whose value in `column` is one of these."""
    return [row for row in rows if row[column] in values]


def knee_of(tables: Tables, scenario: str) -> float:
    """Return 1× load in requests/s.  Raises ValueError if the scenario was not measured."""
    rows = pick(tables["runs"], scenario=scenario)
    if not rows:
        raise ValueError(f"{scenario} is not measured: python -m experiments.arena run first")
    return float(rows[0]["knee_requests_per_s"])


def best(rows: Sequence[Row], column: str) -> Row | None:
    """Return the first row with the highest value; None if there is no row."""
    return max(rows, key=itemgetter(column), default=None)
