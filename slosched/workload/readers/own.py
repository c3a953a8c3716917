"""Our own format: the trace's name and provenance on top, then a row a request, CSV or JSONL."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TextIO

from slosched.core import SLO
from slosched.workload.readers.rows import HEADER_KEY, Row
from slosched.workload.trace import Provenance, Trace, TraceError, TraceRequest

COLUMNS = (
    *("request_id", "arrival_s", "num_prompt_tokens", "num_output_tokens"),
    *("slo_ttft_s", "slo_tpot_s", "slo_e2e_s"),
)
_VERSION = 1
_MAGIC = f"# slosched-trace {_VERSION}"


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write JSONL if the name ends in `.jsonl`, else CSV; `read_trace` gives the trace back.

    Name and provenance are the first line of JSONL and `#` lines on top of CSV.
    """
    path = Path(path)
    write = _write_jsonl if path.suffix == ".jsonl" else _write_csv
    with path.open("w", encoding="utf-8", newline="") as file:
        write(trace, file)


def _write_csv(trace: Trace, file: TextIO) -> None:
    file.write(f"{_MAGIC}\n# name: {json.dumps(trace.name)}\n")
    file.write(f"# provenance: {json.dumps(dict(trace.provenance))}\n")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for r in trace.requests:
        e2e_s = "" if r.slo.e2e_s is None else repr(float(r.slo.e2e_s))
        lengths = (r.num_prompt_tokens, r.num_output_tokens)
        promise = (repr(float(r.slo.ttft_s)), repr(float(r.slo.tpot_s)), e2e_s)
        writer.writerow((r.request_id, repr(float(r.arrival_s)), *lengths, *promise))


def _write_jsonl(trace: Trace, file: TextIO) -> None:
    header = {HEADER_KEY: _VERSION, "name": trace.name, "provenance": dict(trace.provenance)}
    file.write(json.dumps(header) + "\n")
    for r in trace.requests:
        # JSON has no infinity: what is not promised is null.
        slo = (r.slo.ttft_s, r.slo.tpot_s, r.slo.e2e_s)
        promise = (None if s is None or s == math.inf else float(s) for s in slo)
        lengths = (r.num_prompt_tokens, r.num_output_tokens)
        values = (r.request_id, float(r.arrival_s), *lengths, *promise)
        file.write(json.dumps(dict(zip(COLUMNS, values, strict=True))) + "\n")


def own_request(row: Row) -> TraceRequest:
    if not row.values.get("request_id"):
        raise row.wrong("request_id", "some text")
    ttft_s, tpot_s, e2e_s = (_promise_s(row, column) for column in COLUMNS[-3:])
    return TraceRequest(
        request_id=str(row.values["request_id"]),
        arrival_s=row.seconds("arrival_s"),
        num_prompt_tokens=row.tokens("num_prompt_tokens"),
        num_output_tokens=row.tokens("num_output_tokens"),
        slo=SLO(
            math.inf if ttft_s is None else ttft_s, math.inf if tpot_s is None else tpot_s, e2e_s
        ),
    )


def _promise_s(row: Row, column: str) -> float | None:
    """None where nothing is promised: null, or an empty cell."""
    return None if row.values.get(column) in (None, "") else row.promise_s(column)


def own_header(path: Path, lines: Sequence[str]) -> tuple[str, Provenance]:
    """Name and provenance; a file written by hand may have neither."""
    first = lines[0].lstrip() if lines else ""
    found: dict[str, object] = {"name": path.stem, "provenance": {}}
    found |= _json_header(first) if first.startswith("{") else _comment_header(path, lines)
    name, provenance = found["name"], found["provenance"]
    if not isinstance(name, str) or not isinstance(provenance, dict):
        raise TraceError(
            f"{path}: name and provenance are {name!r} and {provenance!r}; "
            "expected a JSON string and a JSON object"
        )
    return name, provenance


def _json_header(line: str) -> Mapping[str, object]:
    values: dict[str, object] = json.loads(line)  # which rows_of has read before
    keys = ("name", "provenance") if HEADER_KEY in values else ()
    return {key: values[key] for key in keys if key in values}


def _comment_header(path: Path, lines: Sequence[str]) -> Mapping[str, object]:
    found: dict[str, object] = {}
    for line in takewhile(lambda line: line.startswith("#"), lines):
        key, _, value = line.removeprefix("# ").partition(": ")
        if key in ("name", "provenance"):
            try:
                found[key] = json.loads(value)
            except json.JSONDecodeError as error:
                raise TraceError(f"{path}: {key} is {value!r}; expected JSON ({error})") from None
    return found
