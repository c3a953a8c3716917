"""Reads a trace file: recognises its format, checks every row, and notes what was done.

A row that cannot be read stops the reading with file, line, value and expectation, unless such rows
are to be skipped. Rows that their publishers do not count as requests are left out.  Both kinds are
counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np

from slosched.workload.readers import quanta
from slosched.workload.readers.files import read_rows
from slosched.workload.readers.formats import FORMATS, Format, recognise
from slosched.workload.readers.own import MARKS, PROMISES, own_header, promise
from slosched.workload.readers.rows import BadRows, Row, RowError
from slosched.workload.readers.sharegpt import (
    ESTIMATE,
    TokenCounter,
    estimate_tokens,
    first_exchange,
)
from slosched.workload.request import TraceError, TraceRequest
from slosched.workload.trace import Trace

MADE_UP_RATE = 1.0
"""Requests/s of the Poisson arrivals given to a file that has none."""
MAX_REQUESTS = 5_000_000
"""Most requests in one trace, which is held in memory; longer files are read in parts.

A request takes 200 bytes (1,100 bytes in Mooncake's, which have prefix hashes).
"""
MADE_UP = "made up: the file has none"
"""The provenance's note on arrivals that were drawn because the file has none."""
_QUANTUM_ROWS = 1000
"""Number of rows that is enough to see how coarsely timestamps were rounded."""

_ANYWHERE = MARKS.keys() | {"session_id", *PROMISES}
"""Columns that a file of any format may have."""

_Note = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class _Part:
    """The wanted rows of a file: those that arrive in an interval, at most a given number."""

    num_requests: int | None
    start_s: float
    duration_s: float

    def __post_init__(self) -> None:
        if self.num_requests is not None and self.num_requests < 1:
            raise ValueError(f"num_requests must be at least 1, not {self.num_requests!r}")
        if not (0 <= self.start_s < math.inf and self.duration_s > 0):
            raise ValueError(
                "a part of a trace needs a start_s >= 0 and a duration_s > 0, "
                f"not {self.start_s!r} and {self.duration_s!r}"
            )

    def __str__(self) -> str:
        window = f" in [{self.start_s:g}, {self.start_s + self.duration_s:g}) s"
        return window if self.is_window else ""

    @property
    def note(self) -> _Note:
        start: _Note = {"window_start_s": self.start_s} if self.is_window else {}
        return start | ({"window_s": self.duration_s} if self.duration_s < math.inf else {})

    @property
    def is_window(self) -> bool:
        return self.start_s > 0 or self.duration_s < math.inf

    def of(self, requests: Iterable[TraceRequest], known: Format) -> Iterator[TraceRequest]:
        """Yield the wanted requests; nothing behind the last of them is read.

        For rounded times a few more are yielded: all requests of the last time and the first one of
        the next time, between which the last are spread, and enough requests to see the rounding.
        """
        is_exact = known.quantum_s is quanta.exact
        wanted = math.inf if self.num_requests is None else self.num_requests
        enough = wanted if is_exact else max(wanted, _QUANTUM_ROWS)
        first_s = last_s = math.nan
        num_taken = 0
        for request in requests:
            if self.is_window:
                first_s = request.arrival_s if math.isnan(first_s) else first_s
                since_s = request.arrival_s - first_s
                if since_s >= self.start_s + self.duration_s:
                    return
                if since_s < self.start_s:
                    continue
            yield request
            num_taken += 1
            if num_taken >= enough and (is_exact or request.arrival_s != last_s):
                return
            last_s = request.arrival_s


def read_trace(
    path: str | Path,
    format: str = "auto",  # noqa: A002  # the field's word
    *,
    seed: int = 0,
    unsorted: Literal["sort", "refuse"] = "sort",
    count_tokens: TokenCounter | None = None,
    num_requests: int | None = None,
    start_s: float = 0.0,
    duration_s: float = math.inf,
    skip_bad: bool = False,
) -> Trace:
    """Read a trace file; "auto" recognises the format by its column names.

    `seed` is for what the file does not say: where within a rounded timestamp a request arrives,
    and Poisson arrivals at `MADE_UP_RATE` where there are none.  `unsorted` says what happens to a
    file whose rows are not in order of arrival; rows that had to be sorted are counted in the
    provenance. `count_tokens` measures the texts of ShareGPT; it is `estimate_tokens` unless given.

    `num_requests`, and `start_s` and `duration_s` counted from the first row, name a part of the
    file. No more of the file is read than the part takes, so out-of-order rows behind its end are
    missed. `skip_bad` leaves out rows that cannot be read, and counts them in the provenance.

    Raises TraceError (a ValueError) for a file that is not such a trace, and OSError for one that
    cannot be opened.
    """
    path = Path(path)
    part = _Part(num_requests, start_s, duration_s)
    if format not in ("auto", *FORMATS):
        raise TraceError(f"unknown trace format {format!r}; choose auto or {', '.join(FORMATS)}")
    bad, counts = BadRows(skip_bad), _Counts()
    with path.open("rb") as file:
        reading = read_rows(path, file, bad)
        first = next(reading.rows, None)
        if first is None:
            raise TraceError(f"{path} is empty: it holds no request{bad.why_none}")
        kind = recognise(first) if format == "auto" else format
        known = FORMATS[kind]
        if kind == "sharegpt":
            measure = partial(first_exchange, count_tokens=count_tokens or estimate_tokens)
            known = replace(known, reader=lambda: measure)
        rows = chain((first,), reading.rows)
        wanted = part.of(_requests(path, rows, known, unsorted, counts, bad), known)
        requests = list(islice(wanted, MAX_REQUESTS + 1))
        digest = reading.digest(path)
    if len(requests) > MAX_REQUESTS:
        raise TraceError(
            f"{path} has more than {MAX_REQUESTS:,} requests{part}, and a trace lies in memory: "
            "read less, with num_requests (-n) or start_s and duration_s (--start, --duration)"
        )
    if not requests:
        left_out = f": every row was left out ({known.left_out})" if counts.left_out else ""
        raise TraceError(f"{path} holds no request{part}{left_out}{bad.why_none}")
    if kind == "slosched":
        header = own_header(path, reading.top)
        seen = {name: count for name, count in (counts.note(known) | bad.note).items() if count}
        origin = {**header.provenance, **seen, **part.note}
        trace = Trace.of(requests, header.name, origin, header.prefix_block_tokens)
    else:
        note: _Note = {"source": path.name, "format": kind, **digest, **part.note}
        if kind == "sharegpt":
            note["tokens"] = "counted by the caller's tokenizer" if count_tokens else ESTIMATE
        trace = _timed(requests, known, path.stem, note | counts.note(known) | bad.note, seed)
    return trace if num_requests is None else trace.head(num_requests)


@dataclass
class _Counts:
    """Counts of unusual rows."""

    out_of_order: int = 0
    before_zero: int = 0
    left_out: int = 0

    def note(self, known: Format) -> _Note:
        noted: _Note = {"rows_out_of_order": self.out_of_order}
        if self.before_zero:
            noted |= {"rows_before_zero": self.before_zero}
        if self.left_out:
            noted |= {"rows_left_out": self.left_out, "rows_left_out_are": known.left_out}
        return noted


def _requests(
    path: Path,
    rows: Iterable[Row],
    known: Format,
    unsorted: Literal["sort", "refuse"],
    counts: _Counts,
    bad: BadRows,
) -> Iterator[TraceRequest]:
    """Yield the requests of the rows, in their order."""
    request_of = known.reader()
    latest_s, latest = -math.inf, ""
    for row in rows:
        try:
            request = _marked(request_of(row), row)
        except RowError as error:
            bad.add(error)
            continue
        except TraceError as error:
            bad.add(RowError(f"{path}, {row.place}: {error}", "request"))
            continue
        if request is None:
            counts.left_out += 1
            continue
        if known.arrival is not None and request.arrival_s < latest_s:
            counts.out_of_order += 1
            if unsorted == "refuse":
                raise row.wrong(known.arrival, f"a time not before that of {latest}, in order")
        counts.before_zero += request.arrival_s < 0
        latest_s, latest = request.arrival_s, row.place
        yield request


def _marked(request: TraceRequest | None, row: Row) -> TraceRequest | None:
    """Return the request with its row's SLO and marks, such as `priority`, in any format.

    A format that knows sessions by another column than `session_id` keeps its own.
    """
    if request is None or not _ANYWHERE & row.values.keys():
        return request
    return replace(
        request,
        slo=promise(row),
        priority=row.priority(),
        lora_id=row.text("lora_id"),
        n=row.num_answers(),
        tier=row.text("tier"),
        tenant=row.text("tenant"),
        session_id=request.session_id or row.text("session_id"),
        think_s=_seconds_if_given(row, "think_s"),
        program_s=_seconds_if_given(row, "program_s"),
        on_infeasible=row.on_infeasible(),
    )


def _seconds_if_given(row: Row, column: str) -> float | None:
    """Return the seconds of a column; None for null or an empty cell."""
    return None if row.values.get(column) in (None, "") else row.seconds(column)


def _timed(requests: list[TraceRequest], known: Format, name: str, note: _Note, seed: int) -> Trace:
    """Make the trace, and draw what the file does not say about arrivals."""
    block = known.prefix_block_tokens if any(r.prefix_hashes for r in requests) else None
    if known.arrival is None:
        note["arrivals"] = MADE_UP
        trace = Trace.of(requests, name, note, block)
        return trace.with_poisson_arrivals(MADE_UP_RATE, seed)
    quantum_s = known.quantum_s(np.array([r.arrival_s for r in requests]))
    if quantum_s is not None:
        requests = quanta.spread(requests, quantum_s, seed)
        note |= {"timestamps_spread_over_s": quantum_s, "spread_seed": seed}
    return Trace.of(requests, name, note, block)
