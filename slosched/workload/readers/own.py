"""slosched's own format: name and provenance on top, then one row for each request.

Files are CSV, JSONL or Parquet.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slosched.append_line import append_line
from slosched.core import SLO, OnInfeasible
from slosched.workload.readers.files import HEADER_KEY
from slosched.workload.readers.rows import Row
from slosched.workload.request import TraceError, TraceRequest
from slosched.workload.trace import Provenance, Trace

PROMISES = ("slo_ttft_s", "slo_tpot_s", "slo_e2e_s")
NEEDED = ("request_id", "arrival_s", "num_prompt_tokens", "num_output_tokens")
"""The columns by which a file is recognised, also one written by hand that promises nothing."""
COLUMNS = (*NEEDED, *PROMISES)
"""The columns of every file that is written."""
_SHARING_COLUMNS = ("session_id", "prefix_hashes")
MARKS = {
    "priority": 0,
    "lora_id": None,
    "n": 1,
    "tier": None,
    "tenant": None,
    "think_s": None,
    "program_s": None,
    "on_infeasible": OnInfeasible.REJECT,
}
"""Columns that, like the sharing columns, are only in files of traces that have them, and the
values of requests without them."""
_MORE = (*_SHARING_COLUMNS, *MARKS)
_VERSION = 1
_MAGIC_KEY = "slosched-trace"
_MAGIC = f"# {_MAGIC_KEY} {_VERSION}"


@dataclass(frozen=True, slots=True)
class Header:
    """The header above the requests; files written by hand need not have one."""

    name: str
    provenance: Provenance
    prefix_block_tokens: int | None


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write the format of the file's suffix: `.jsonl`, `.parquet`, else CSV.

    Name and provenance are the first line of JSONL, `#` lines on top of CSV, and under the key
    `slosched_trace` in the metadata of Parquet. `read_trace` reads all three.
    """
    path = Path(path)
    writers = {".jsonl": _write_jsonl, ".parquet": _write_parquet}
    writers.get(path.suffix, _write_csv)(trace, path)


def _write_csv(trace: Trace, path: Path) -> None:
    header = _header(trace)
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"{_MAGIC}\n")
        file.writelines(
            f"# {key}: {json.dumps(value)}\n" for key, value in header.items() if key != HEADER_KEY
        )
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_columns(trace))
        for row in _rows(trace):
            writer.writerow(_cell(value) for value in row)


def _cell(value: object) -> object:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return repr(value)
    return "" if value is None else value


def _write_jsonl(trace: Trace, path: Path) -> None:
    columns = _columns(trace)
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(json.dumps(_header(trace)) + "\n")
        file.writelines(_json_line(zip(columns, row, strict=True)) for row in _rows(trace))


def _write_parquet(trace: Trace, path: Path) -> None:
    import pyarrow as pa  # half a second to import, only for Parquet files
    from pyarrow import parquet

    types = {"request_id": pa.string(), "session_id": pa.string()}
    types |= {"num_prompt_tokens": pa.int64(), "num_output_tokens": pa.int64()}
    types |= {"priority": pa.int64(), "n": pa.int64()}
    types |= dict.fromkeys(("lora_id", "tier", "tenant", "on_infeasible"), pa.string())
    types |= {"prefix_hashes": pa.list_(pa.int64())}
    metadata = {HEADER_KEY: json.dumps(_header(trace))}
    fields = [pa.field(column, types.get(column, pa.float64())) for column in _columns(trace)]
    columns = list(zip(*_rows(trace), strict=True))
    table = pa.table(
        [pa.array(values, field.type) for values, field in zip(columns, fields, strict=True)],
        schema=pa.schema(fields, metadata),
    )
    parquet.write_table(table, path)


def begin_trace(
    path: Path, name: str, provenance: Provenance, prefix_block_tokens: int | None = None
) -> None:
    """Write a JSONL file without a request, for `append_request`."""
    header = _header_of(name, provenance, prefix_block_tokens)
    path.write_text(json.dumps(header) + "\n", encoding="utf-8")


def append_request(path: Path, request: TraceRequest) -> None:
    """Add a request to a file that `begin_trace` began; requests may come in any order."""
    values = zip((*COLUMNS, *_MORE), _row(request, _MORE), strict=True)
    append_line(path, _json_line(values))


def _json_line(values: Iterable[tuple[str, object]]) -> str:
    # JSON has no infinity, so a time that is not promised is null.
    row = {column: None if value == math.inf else value for column, value in values}
    return json.dumps(row) + "\n"


def _header(trace: Trace) -> dict[str, object]:
    return _header_of(trace.name, trace.provenance, trace.prefix_block_tokens)


def _header_of(
    name: str, provenance: Provenance, prefix_block_tokens: int | None
) -> dict[str, object]:
    header: dict[str, object] = {HEADER_KEY: _VERSION, "name": name}
    header["provenance"] = dict(provenance)
    if prefix_block_tokens is not None:
        header["prefix_block_tokens"] = prefix_block_tokens
    return header


def _columns(trace: Trace) -> tuple[str, ...]:
    shares = any(r.prefix_hashes or r.session_id for r in trace.requests)
    marks = (
        name
        for name, default in MARKS.items()
        if any(getattr(r, name) != default for r in trace.requests)
    )
    return (*COLUMNS, *(_SHARING_COLUMNS if shares else ()), *marks)


def _rows(trace: Trace) -> Iterator[tuple[object, ...]]:
    """Yield the values of each request, in the order of `_columns`."""
    more = _columns(trace)[len(COLUMNS) :]
    return (_row(request, more) for request in trace.requests)


def _row(r: TraceRequest, more: Iterable[str]) -> tuple[object, ...]:
    """Return the values of `COLUMNS`, and then of the columns `more`."""
    e2e_s = None if r.slo.e2e_s is None else float(r.slo.e2e_s)
    promise = (float(r.slo.ttft_s), float(r.slo.tpot_s), e2e_s)
    lengths = (r.num_prompt_tokens, r.num_output_tokens)
    values = (r.request_id, float(r.arrival_s), *lengths, *promise)
    return (*values, *(getattr(r, name) for name in more))


def own_request(row: Row) -> TraceRequest:
    request_id = row.text("request_id")
    if request_id is None:
        raise row.wrong("request_id", "some text")
    return TraceRequest(
        request_id=request_id,
        arrival_s=row.seconds("arrival_s"),
        num_prompt_tokens=row.tokens("num_prompt_tokens"),
        num_output_tokens=row.tokens("num_output_tokens"),
        slo=promise(row),
        prefix_hashes=row.hashes("prefix_hashes"),
        session_id=row.text("session_id"),
    )


def promise(row: Row) -> SLO:
    """Return what a row promises in the columns `PROMISES`, each of which may be missing."""
    ttft_s, tpot_s, e2e_s = (_promise_s(row, column) for column in PROMISES)
    return SLO(
        math.inf if ttft_s is None else ttft_s, math.inf if tpot_s is None else tpot_s, e2e_s
    )


def _promise_s(row: Row, column: str) -> float | None:
    """Return the promised seconds; None for null, an empty cell or no such column."""
    return None if row.values.get(column) in (None, "") else row.promise_s(column)


def own_header(path: Path, top: Sequence[str]) -> Header:
    """Read the header from the lines above the rows; the name defaults to the file's.

    Raises TraceError for a header that is wrong, or of another version.
    """
    found: dict[str, object] = {"name": path.stem, "provenance": {}, "prefix_block_tokens": None}
    is_json = bool(top) and top[-1].lstrip().startswith("{")
    found |= _json_header(top[-1]) if is_json else _comment_header(path, top)
    version = found.get(HEADER_KEY, _VERSION)
    if version not in (_VERSION, str(_VERSION)):
        raise TraceError(
            f"{path} is of version {version} of slosched's traces, but this slosched reads version "
            f"{_VERSION}: read it with the slosched that wrote it, or a newer one"
        )
    name, provenance = found["name"], found["provenance"]
    block = found["prefix_block_tokens"]
    if not isinstance(name, str) or not isinstance(provenance, dict):
        raise TraceError(
            f"{path}: name and provenance are {name!r} and {provenance!r}; "
            "expected a JSON string and a JSON object"
        )
    if not (block is None or isinstance(block, int)):
        raise TraceError(f"{path}: prefix_block_tokens is {block!r}; expected a whole number")
    return Header(name, provenance, block)


def _json_header(line: str) -> Mapping[str, object]:
    try:
        values: dict[str, object] = json.loads(line)
    except (ValueError, RecursionError):  # a bad row, which was skipped and counted
        return {}
    return values if HEADER_KEY in values else {}


def _comment_header(path: Path, top: Sequence[str]) -> Mapping[str, object]:
    found: dict[str, object] = {}
    for line in top:
        if line.startswith(f"# {_MAGIC_KEY} "):
            found[HEADER_KEY] = line.rpartition(" ")[2]
        key, _, value = line.removeprefix("# ").partition(": ")
        if key in ("name", "provenance", "prefix_block_tokens"):
            try:
                found[key] = json.loads(value)
            except json.JSONDecodeError as error:
                raise TraceError(f"{path}: {key} is {value!r}; expected JSON ({error})") from None
    return found
