"""The rows of CSV, JSONL and JSON files, with values that can say what is wrong with them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from slosched.workload.trace import TraceError

HEADER_KEY = "slosched_trace"
"""In a JSON object on top that is no row: our own header."""
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file, by column."""

    path: Path
    number: int
    values: Mapping[str, object]
    unit: str = "line"
    """What `number` counts from 1: lines, or items of a JSON list."""

    @property
    def place(self) -> str:
        return f"{self.unit} {self.number}"

    def wrong(self, column: str, expected: str) -> TraceError:
        value = self.values.get(column)
        what = "is missing" if value is None else f"is {_short(value)}"
        return TraceError(f"{self.path}, {self.place}: {column} {what}; expected {expected}")

    def tokens(self, column: str, least: int = 1) -> int:
        value = self.values.get(column)
        if isinstance(value, str) and value.strip().isdecimal() and len(value) < 19:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(column, f"a whole number of tokens, at least {least}")
        return value

    def number_of(self, column: str, expected: str, low: float, high: float) -> float:
        """A number in [low, high]; NaN is in no interval."""
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
        """Any time; zero may be anywhere."""
        limit = float(np.finfo(np.float64).max)
        return self.number_of(column, "a finite number of seconds", -limit, limit)

    def seconds_since_start(self, column: str) -> float:
        return self.number_of(column, "seconds, not negative", 0, 1e12)

    def promise_s(self, column: str) -> float:
        return self.number_of(column, "a positive number of seconds, or inf", 5e-324, math.inf)

    def timestamp_s(self, column: str) -> float:
        """Seconds since 1970 of a date and time, read as UTC if it names no zone."""
        try:
            moment = datetime.fromisoformat(str(self.values.get(column)))
        except ValueError:
            raise self.wrong(column, "a time such as 2023-11-16 18:17:03.97996") from None
        zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return zoned.timestamp()


def rows_of(path: Path, lines: Sequence[str]) -> Iterator[Row]:
    """The rows of a file; blank lines and `#` lines above the data are not rows."""
    first = next((i for i, line in enumerate(lines) if line.strip() and line[0] != "#"), None)
    if first is None:
        return
    opening = lines[first].lstrip()[0]
    if opening == "{":
        yield from _json_lines(path, lines, first)
    elif opening == "[":
        yield from _json_items(path, "\n".join(lines[first:]), first)
    else:
        yield from _csv_rows(path, lines, first)


def _json_lines(path: Path, lines: Sequence[str], first: int) -> Iterator[Row]:
    for number, line in enumerate(lines[first:], start=first + 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
            raise TraceError(f"{path}, line {number}: not JSON ({error}): {line[:80]!r}") from None
        row = _object(values, f"{path}, line {number}")
        if number == first + 1 and HEADER_KEY in row:
            continue
        yield Row(path, number, row)


def _json_items(path: Path, text: str, lines_above: int) -> Iterator[Row]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{path}, line {lines_above + error.lineno}"
        raise TraceError(f"{place}, column {error.colno}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON that can be read ({error})") from None
    for number, values in enumerate(items, start=1):
        yield Row(path, number, _object(values, f"{path}, item {number}"), unit="item")


def _object(values: object, place: str) -> Mapping[str, object]:
    if not isinstance(values, dict):
        raise TraceError(f"{place}: expected a JSON object, not {_short(values)}")
    return values


def _csv_rows(path: Path, lines: Sequence[str], first: int) -> Iterator[Row]:
    reader = csv.reader(lines[first:])
    try:
        columns = [column.strip() for column in next(reader)]
        for cells in reader:
            number = first + reader.line_num
            if not cells:
                continue
            if len(cells) != len(columns):
                raise TraceError(
                    f"{path}, line {number}: {len(cells)} values {_short(cells)}; "
                    f"expected {len(columns)}: {', '.join(columns)}"
                )
            yield Row(path, number, dict(zip(columns, cells, strict=True)))
    except csv.Error as error:
        raise TraceError(f"{path}, line {first + reader.line_num}: not CSV ({error})") from None


def _short(value: object) -> str:
    """As Python writes it, cut where it would fill the screen."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " …"
