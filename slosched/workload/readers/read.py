"""Reading a trace file: recognise its format, check every row, note what was done.

A row that cannot be read stops the reading with file, line, value and expectation; only rows that
their publishers call no requests are left out, and counted.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from slosched.workload.readers import quanta
from slosched.workload.readers.formats import FORMATS, Format, recognise
from slosched.workload.readers.own import own_header
from slosched.workload.readers.rows import Row, rows_of
from slosched.workload.readers.sharegpt import (
    ESTIMATE,
    TokenCounter,
    estimate_tokens,
    first_exchange,
)
from slosched.workload.trace import Trace, TraceError, TraceRequest

MADE_UP_RATE = 1.0
"""Requests/s of the Poisson arrivals given to a file that has none."""

_Note = dict[str, str | int | float]


def read_trace(
    path: str | Path,
    format: str = "auto",  # noqa: A002  # the field's word
    *,
    seed: int = 0,
    unsorted: Literal["sort", "refuse"] = "sort",
    count_tokens: TokenCounter | None = None,
) -> Trace:
    """Read a trace file; "auto" recognises the format by its column names.

    `seed` is for what the file does not say: where within a rounded timestamp a request arrives,
    and Poisson arrivals at `MADE_UP_RATE` where there are none.  `unsorted` says what becomes of
    a file whose rows are not in order of arrival; sorted ones are counted in the provenance.
    `count_tokens` measures the texts of ShareGPT, `estimate_tokens` unless given.

    Raises TraceError (a ValueError) for a file that is not such a trace, and OSError for one that
    cannot be opened.
    """
    path = Path(path)
    if format not in ("auto", *FORMATS):
        raise TraceError(f"unknown trace format {format!r}; choose auto or {', '.join(FORMATS)}")
    raw = path.read_bytes()
    lines = _lines(path, raw)
    rows = rows_of(path, lines)
    first = next(rows, None)
    if first is None:
        raise TraceError(f"{path} is empty: it holds no request")
    kind = recognise(first) if format == "auto" else format
    known = FORMATS[kind]
    note: _Note = {
        "source": path.name,
        "format": kind,
        "sha256": hashlib.sha256(raw).hexdigest(),
    }
    if kind == "sharegpt":
        known = replace(
            known, request=partial(first_exchange, count_tokens=count_tokens or estimate_tokens)
        )
        note["tokens"] = ESTIMATE if count_tokens is None else "counted by the caller's tokenizer"
    requests = list(_requests(chain((first,), rows), known, unsorted, note))
    if not requests:
        raise TraceError(f"{path} holds no request: every row was left out ({known.left_out})")
    if kind == "slosched":
        name, provenance = own_header(path, lines)
        return Trace.of(requests, name, provenance)
    return _timed(requests, known, path.stem, note, seed)


def _lines(path: Path, raw: bytes) -> list[str]:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not a text file: {error}") from None
    # Not str.splitlines, which also breaks at characters that JSON text may hold, as U+2028.
    return [line.rstrip("\n") for line in io.StringIO(text, newline=None)]


def _requests(
    rows: Iterable[Row], known: Format, unsorted: Literal["sort", "refuse"], note: _Note
) -> Iterator[TraceRequest]:
    """The requests of the rows, in their order; counts in `note` what is out of the ordinary."""
    out_of_order = left_out = 0
    latest_s, latest = -np.inf, ""
    for row in rows:
        request = known.request(row)
        if request is None:
            left_out += 1
            continue
        if known.arrival is not None and request.arrival_s < latest_s:
            out_of_order += 1
            if unsorted == "refuse":
                raise row.wrong(known.arrival, f"a time not before that of {latest}, in order")
        latest_s, latest = request.arrival_s, row.place
        yield request
    note["rows_out_of_order"] = out_of_order
    if left_out:
        note |= {"rows_left_out": left_out, "rows_left_out_are": known.left_out}


def _timed(requests: list[TraceRequest], known: Format, name: str, note: _Note, seed: int) -> Trace:
    """The trace, with arrivals where the file says too little of them."""
    if known.arrival is None:
        note["arrivals"] = "made up: the file has none"
        return Trace.of(requests, name, note).with_poisson_arrivals(MADE_UP_RATE, seed)
    quantum_s = known.quantum_s(np.array([r.arrival_s for r in requests]))
    if quantum_s is not None:
        requests = quanta.spread(requests, quantum_s, seed)
        note |= {"timestamps_spread_over_s": quantum_s, "spread_seed": seed}
    return Trace.of(requests, name, note)
