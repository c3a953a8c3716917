"""A table as a list of records: what page and figures ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

Row = dict[str, Any]
Tables = dict[str, list[Row]]
"""By kind of result."""


def pick(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """Those with these values; `class_` stands for the column of that name."""
    wanted = {name.rstrip("_"): value for name, value in wanted.items()}
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def among(rows: Sequence[Row], column: str, values: Sequence[object]) -> list[Row]:
    """Those whose value is one of these."""
    return [row for row in rows if row[column] in values]


def knee_of(tables: Tables, scenario: str) -> float:
    """1× load, in requests/s.  Raises ValueError if nobody has measured it."""
    rows = pick(tables["runs"], scenario=scenario)
    if not rows:
        raise ValueError(f"{scenario} is not measured: python -m experiments.arena run first")
    return float(rows[0]["knee_requests_per_s"])


def best(rows: Sequence[Row], column: str) -> Row | None:
    """The first of the highest; None of none."""
    return max(rows, key=itemgetter(column), default=None)
