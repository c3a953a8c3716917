"""Our own format: CSV with the trace's name and provenance as `#` lines on top."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from slosched.core import SLO
from slosched.workload.readers.rows import Row
from slosched.workload.trace import Provenance, Trace, TraceError, TraceRequest

COLUMNS = (
    *("request_id", "arrival_s", "num_prompt_tokens", "num_output_tokens"),
    *("slo_ttft_s", "slo_tpot_s", "slo_e2e_s"),
)
_MAGIC = "# slosched-trace 1"


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write CSV with the name and provenance as `#` lines on top; `read_trace` gives it back."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        file.write(f"{_MAGIC}\n# name: {json.dumps(trace.name)}\n")
        file.write(f"# provenance: {json.dumps(dict(trace.provenance))}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for r in trace.requests:
            e2e_s = "" if r.slo.e2e_s is None else repr(float(r.slo.e2e_s))
            lengths = (r.num_prompt_tokens, r.num_output_tokens)
            promise = (repr(float(r.slo.ttft_s)), repr(float(r.slo.tpot_s)), e2e_s)
            writer.writerow((r.request_id, repr(float(r.arrival_s)), *lengths, *promise))


def own_request(row: Row) -> TraceRequest:
    if not row.values.get("request_id"):
        raise row.wrong("request_id", "some text")
    e2e_s = row.promise_s("slo_e2e_s") if row.values.get("slo_e2e_s") else None
    return TraceRequest(
        request_id=str(row.values["request_id"]),
        arrival_s=row.seconds("arrival_s"),
        num_prompt_tokens=row.tokens("num_prompt_tokens"),
        num_output_tokens=row.tokens("num_output_tokens"),
        slo=SLO(row.promise_s("slo_ttft_s"), row.promise_s("slo_tpot_s"), e2e_s),
    )


def own_header(path: Path, lines: Sequence[str]) -> tuple[str, Provenance]:
    """Name and provenance; a file written by hand may have neither."""
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
