"""One row of a trace file, whose values are checked when they are read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from slosched.core import OnInfeasible
from slosched.workload.request import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    MOST_SEQUENCES,
    MOST_TOKENS,
    TraceError,
)

_MAX_SHOWN = 200
_MAX_HASH = 2**63 - 1
"""Largest integer that a Parquet column holds."""
_MOST_S = 1e12
"""The most seconds, which is more than 30,000 years and less than the milliseconds since 1970."""


class RowError(TraceError):
    """A row that cannot be read.  `what` is the column, or names another problem."""

    def __init__(self, message: str, what: str) -> None:
        super().__init__(message)
        self.what = what


@dataclass
class BadRows:
    """The rows that cannot be read: the first one raises, or all are skipped and counted."""

    skip: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    first: RowError | None = None

    def add(self, error: RowError) -> None:
        if not self.skip:
            raise TraceError(
                f"{error}; mend it, or leave out such rows: skip_bad=True, --skip-bad"
            ) from None
        self.first = self.first or error
        self.counts[error.what] += 1

    @property
    def note(self) -> dict[str, str | int | float]:
        """Return the provenance's note: how many rows were bad, and what was wrong with them."""
        if not self.counts:
            return {}
        kinds = ", ".join(f"{what}: {count}" for what, count in self.counts.most_common())
        return {"rows_bad": self.counts.total(), "rows_bad_are": kinds}

    @property
    def why_none(self) -> str:
        """Return what an error message adds where no row is left."""
        return (
            f"; {self.counts.total()} bad rows were skipped, first {self.first}"
            if self.first
            else ""
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file, by column."""

    path: Path
    number: int
    values: Mapping[str, object]
    unit: str = "line"
    """The unit in which `number` counts, from 1: lines, rows of Parquet, or items of a JSON list.
    """

    @property
    def place(self) -> str:
        return f"{self.unit} {self.number}"

    def wrong(self, column: str, expected: str) -> RowError:
        value = self.values.get(column)
        what = "is missing" if value is None else f"is {short(value)}"
        message = f"{self.path}, {self.place}: {column} {what}; expected {expected}"
        return RowError(message, column)

    def tokens(self, column: str, least: int = 1) -> int:
        """Return a whole number of tokens, also of "12.0", as pandas writes a column with gaps."""
        value = self.values.get(column)
        if isinstance(value, str):
            whole, _, fraction = value.strip().partition(".")
            if whole.isdecimal() and len(whole) < 19 and not fraction.strip("0"):
                value = int(whole)
        elif isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(column, f"a whole number of tokens, at least {least}")
        if value > MOST_TOKENS:
            raise self.wrong(column, f"at most {MOST_TOKENS} tokens")
        return value

    def priority(self) -> int:
        """Return the cell `priority`; 0 if it is empty or missing."""
        expected = f"a whole number in [{MIN_PRIORITY}, {MAX_PRIORITY}]"
        if self.text("priority") is None:
            return 0
        number = self.number_of("priority", expected, MIN_PRIORITY, MAX_PRIORITY)
        if not number.is_integer():
            raise self.wrong("priority", expected)
        return int(number)

    def on_infeasible(self) -> OnInfeasible:
        """Return the cell `on_infeasible`; "reject" if it is empty or missing."""
        text = self.text("on_infeasible")
        try:
            return OnInfeasible.REJECT if text is None else OnInfeasible(text)
        except ValueError:
            raise self.wrong("on_infeasible", f"one of {', '.join(OnInfeasible)}") from None

    def num_answers(self) -> int:
        """Return the cell `n`; 1 if it is empty or missing."""
        expected = f"a whole number in [1, {MOST_SEQUENCES}]"
        if self.text("n") is None:
            return 1
        number = self.number_of("n", expected, 1, MOST_SEQUENCES)
        if not number.is_integer():
            raise self.wrong("n", expected)
        return int(number)

    def number_of(self, column: str, expected: str, low: float, high: float) -> float:
        """Return a number in [low, high]; raise RowError for anything else, such as NaN."""
        value = self.values.get(column)
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if not low <= number <= high:
            raise self.wrong(column, expected)
        return number

    def seconds(self, column: str) -> float:
        """Return a time in seconds, from any time zero."""
        expected = f"a number of seconds in [-{_MOST_S:g}, {_MOST_S:g}]"
        return self.number_of(column, expected, -_MOST_S, _MOST_S)

    def milliseconds_since_start(self, column: str) -> float:
        """Return the seconds that a number of milliseconds is."""
        most = 1e3 * _MOST_S
        return self.number_of(column, f"milliseconds in [0, {most:g}]", 0, most) / 1e3

    def seconds_since_start(self, column: str) -> float:
        return self.number_of(column, f"seconds in [0, {_MOST_S:g}]", 0, _MOST_S)

    def promise_s(self, column: str) -> float:
        return self.number_of(column, "a positive number of seconds, or inf", 5e-324, math.inf)

    def timestamp_s(self, column: str) -> float:
        """Return the seconds since 1970 of a date and time, read as UTC if it names no zone."""
        try:
            moment = datetime.fromisoformat(str(self.values.get(column)))
        except ValueError:
            raise self.wrong(column, "a time such as 2023-11-16 18:17:03.97996") from None
        zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return zoned.timestamp()

    def text(self, column: str) -> str | None:
        """Return the cell's text, with whole numbers written as such; None if empty or missing."""
        value = self.values.get(column)
        if isinstance(value, float) and math.isnan(value):
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return None if value in (None, "") else str(value)

    def hashes(self, column: str) -> tuple[int, ...]:
        """Return a list of whole numbers, separated by spaces in CSV; empty if there is none."""
        value = self.values.get(column)
        if value is None:
            return ()
        items = value.split() if isinstance(value, str) else value
        try:
            if not isinstance(items, list):
                raise TypeError
            found = tuple(map(_whole, items))
        except (TypeError, ValueError, OverflowError):
            raise self.wrong(column, "a list of whole numbers") from None
        if any(not -_MAX_HASH <= h <= _MAX_HASH for h in found):
            raise self.wrong(column, "whole numbers of at most 63 bits")
        return found


def _whole(value: str | float) -> int:
    """Return a whole number; raise ValueError or OverflowError for another, as `int` does."""
    number = int(value)
    if isinstance(value, float) and value != number:
        raise ValueError
    return number


def short(value: object) -> str:
    """Return the value as Python writes it, cut where it would fill the screen."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " …"
