"""Trace files: read the public ones as they are published, write and read our own.

A row that cannot be read stops the reading with file, line, value and expectation; no row is
skipped.  Rows out of order are sorted, and their number is noted in the provenance.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

import numpy as np

from slosched.core import SLO
from slosched.workload.trace import Provenance, Trace, TraceError, TraceRequest

_MAGIC = "# slosched-trace 1"
_QUANTISED_SHARE = 0.5
"""Timestamps count as quantised if more than this share of the rows shares one with another."""
_SPREAD_SEED = 0


@dataclass(frozen=True, slots=True)
class _Line:
    """One row of a file, by column, that checks its values and can say what is wrong with them."""

    path: Path
    number: int
    values: Mapping[str, object]

    def wrong(self, column: str, expected: str) -> TraceError:
        value = self.values.get(column)
        what = "is missing" if value is None else f"is {value!r}"
        return TraceError(f"{self.path}, line {self.number}: {column} {what}; expected {expected}")

    def tokens(self, column: str) -> int:
        value = self.values.get(column)
        if isinstance(value, str) and value.strip().isdecimal() and len(value) < 19:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(column, "a whole number of tokens, at least 1")
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
        limit = float(np.finfo(np.float64).max)
        return self.number_of(column, "a finite number of seconds", -limit, limit)

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


def _azure(line: _Line) -> TraceRequest:
    return TraceRequest(
        request_id=str(line.number),
        arrival_s=line.timestamp_s("TIMESTAMP"),
        num_prompt_tokens=line.tokens("ContextTokens"),
        num_output_tokens=line.tokens("GeneratedTokens"),
    )


def _mooncake(line: _Line) -> TraceRequest:
    return TraceRequest(
        request_id=str(line.number),
        arrival_s=line.number_of("timestamp", "milliseconds, not negative", 0, 1e15) / 1e3,
        num_prompt_tokens=line.tokens("input_length"),
        num_output_tokens=line.tokens("output_length"),
    )


def _generic(line: _Line) -> TraceRequest:
    return TraceRequest(
        request_id=str(line.number),
        arrival_s=line.seconds("arrival_s"),
        num_prompt_tokens=line.tokens("input_tokens"),
        num_output_tokens=line.tokens("output_tokens"),
    )


def _own(line: _Line) -> TraceRequest:
    if not line.values.get("request_id"):
        raise line.wrong("request_id", "some text")
    e2e_s = line.promise_s("slo_e2e_s") if line.values.get("slo_e2e_s") else None
    return TraceRequest(
        request_id=str(line.values["request_id"]),
        arrival_s=line.seconds("arrival_s"),
        num_prompt_tokens=line.tokens("num_prompt_tokens"),
        num_output_tokens=line.tokens("num_output_tokens"),
        slo=SLO(line.promise_s("slo_ttft_s"), line.promise_s("slo_tpot_s"), e2e_s),
    )


@dataclass(frozen=True, slots=True)
class _Format:
    """What the rows of a file hold and how one becomes a request."""

    columns: tuple[str, ...]
    request: Callable[[_Line], TraceRequest]


_OWN_COLUMNS = (
    *("request_id", "arrival_s", "num_prompt_tokens", "num_output_tokens"),
    *("slo_ttft_s", "slo_tpot_s", "slo_e2e_s"),
)
FORMATS: Mapping[str, _Format] = {
    "azure": _Format(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure),
    "mooncake": _Format(("timestamp", "input_length", "output_length"), _mooncake),
    "generic": _Format(("arrival_s", "input_tokens", "output_tokens"), _generic),
    "slosched": _Format(_OWN_COLUMNS, _own),
}
"""Azure's CSV (2023, 2024), Mooncake's JSONL, ServeGen's and any other CSV in seconds, our own."""


def read_trace(path: str | Path, format: str = "auto") -> Trace:  # noqa: A002  # the field's word
    """Read a trace file; "auto" recognises the format by its column names.

    Raises TraceError (a ValueError) for a file that is not such a trace, and OSError for one that
    cannot be opened.
    """
    path = Path(path)
    raw = path.read_bytes()
    try:
        lines = raw.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not a text file: {error}") from None
    if format not in ("auto", *FORMATS):
        raise TraceError(f"unknown trace format {format!r}; choose auto or {', '.join(FORMATS)}")
    rows = list(_rows(path, lines))
    if not rows:
        raise TraceError(f"{path} is empty: it holds no request")
    kind = _recognise(rows[0]) if format == "auto" else format
    requests = [FORMATS[kind].request(row) for row in rows]
    if kind == "slosched":
        name, provenance = _header(path, lines)
        return Trace.of(requests, name, provenance)
    if kind == "mooncake":
        requests = _spread(requests)
    arrivals = np.array([request.arrival_s for request in requests])
    provenance = {
        "source": path.name,
        "format": kind,
        "sha256": hashlib.sha256(raw).hexdigest(),
        "rows_out_of_order": int((np.diff(arrivals) < 0).sum()),
    }
    return Trace.of(requests, path.stem, provenance)


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write CSV with the name and provenance as `#` lines on top; `read_trace` gives it back."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        file.write(f"{_MAGIC}\n# name: {json.dumps(trace.name)}\n")
        file.write(f"# provenance: {json.dumps(dict(trace.provenance))}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_OWN_COLUMNS)
        for r in trace.requests:
            e2e_s = "" if r.slo.e2e_s is None else repr(float(r.slo.e2e_s))
            lengths = (r.num_prompt_tokens, r.num_output_tokens)
            promise = (repr(float(r.slo.ttft_s)), repr(float(r.slo.tpot_s)), e2e_s)
            writer.writerow((r.request_id, repr(float(r.arrival_s)), *lengths, *promise))


def _rows(path: Path, lines: Sequence[str]) -> Iterator[_Line]:
    """The rows of a CSV or JSONL file; blank lines and `#` lines above the data are not rows."""
    first = next((i for i, line in enumerate(lines) if line.strip() and line[0] != "#"), None)
    if first is None:
        return
    if lines[first].lstrip().startswith("{"):
        yield from _json_rows(path, lines, first)
    else:
        yield from _csv_rows(path, lines, first)


def _json_rows(path: Path, lines: Sequence[str], first: int) -> Iterator[_Line]:
    for number, line in enumerate(lines[first:], start=first + 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"{path}, line {number}: not JSON ({error}): {line[:80]!r}") from None
        if not isinstance(values, dict):
            raise TraceError(f"{path}, line {number}: expected a JSON object, not {line[:80]!r}")
        yield _Line(path, number, values)


def _csv_rows(path: Path, lines: Sequence[str], first: int) -> Iterator[_Line]:
    reader = csv.reader(lines[first:])
    columns = [column.strip() for column in next(reader)]
    for cells in reader:
        number = first + reader.line_num
        if not cells:
            continue
        if len(cells) != len(columns):
            raise TraceError(
                f"{path}, line {number}: {len(cells)} values {cells!r}; "
                f"expected {len(columns)}: {', '.join(columns)}"
            )
        yield _Line(path, number, dict(zip(columns, cells, strict=True)))


def _recognise(row: _Line) -> str:
    for name, known in FORMATS.items():
        if row.values.keys() >= set(known.columns):
            return name
    shapes = "; ".join(f"{name}: {', '.join(f.columns)}" for name, f in FORMATS.items())
    raise TraceError(
        f"{row.path} is no trace that we know: it has the columns "
        f"{', '.join(map(str, row.values))}; expected one of {shapes}"
    )


def _header(path: Path, lines: Sequence[str]) -> tuple[str, Provenance]:
    """Name and provenance of our own format; a file written by hand may have neither."""
    found: dict[str, object] = {"name": path.stem, "provenance": {}}
    for line in takewhile(lambda line: line.startswith("#"), lines):
        key, _, value = line.removeprefix("# ").partition(": ")
        if key in found:
            try:
                found[key] = json.loads(value)
            except json.JSONDecodeError as error:
                raise TraceError(f"{path}: {key} is {value!r}; expected JSON ({error})") from None
    name, provenance = found["name"], found["provenance"]
    if not isinstance(name, str) or not isinstance(provenance, dict):
        raise TraceError(
            f"{path}: name and provenance are {name!r} and {provenance!r}; "
            "expected a JSON string and a JSON object"
        )
    return name, provenance


def _spread(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Spread requests that share a quantised timestamp over the time until the next one.

    Uniformly at random with a fixed seed, in the order of the file: given how many arrived in a
    quantum, that is what a Poisson process does, whereas equal spacing would look smoother than
    any real arrivals.  Timestamps that are not quantised are left alone.
    """
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    times, counts = np.unique([r.arrival_s for r in ordered], return_counts=True)
    if len(times) < 2 or counts[counts > 1].sum() <= _QUANTISED_SHARE * len(ordered):
        return ordered
    quantum_s = float(np.median(np.diff(times)))
    widths = np.minimum(np.append(np.diff(times), quantum_s), quantum_s)
    rng = np.random.default_rng(_SPREAD_SEED)
    spread = np.concatenate(
        [
            start + width * np.sort(rng.random(count))
            for start, width, count in zip(times, widths, counts, strict=True)
        ]
    )
    return [replace(r, arrival_s=float(t)) for r, t in zip(ordered, spread, strict=True)]
