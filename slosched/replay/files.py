"""Records of a replay as a JSON-lines file: a line of provenance, then one for each request."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from slosched.append_line import append_line
from slosched.core import SLO, EndReason, RequestStatus, SloschedError
from slosched.metrics import RequestRecord

_FORMAT = "slosched-records/1"

T = TypeVar("T")


class RecordsError(SloschedError):
    """A file of records cannot be read."""


@dataclass(frozen=True)
class Replay:
    """The records of a replay, and their provenance."""

    records: list[RequestRecord]
    provenance: Mapping[str, object]


def write_records(
    path: Path, records: Sequence[RequestRecord], provenance: Mapping[str, object]
) -> None:
    """Write records and provenance to `path`, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        header = {"format": _FORMAT, "provenance": dict(provenance)}
        file.write(json.dumps(header, default=str) + "\n")
        file.writelines(_line(record) for record in records)


def append_record(path: Path, record: RequestRecord) -> None:
    """Add a record to a file that `write_records` began, so that a long run loses nothing."""
    append_line(path, _line(record))


def read_records(path: Path) -> Replay:
    """Read records.  Raises RecordsError with file and line for what is not a record."""
    try:
        header, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    except OSError as error:
        raise RecordsError(f"cannot read the records {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecordsError(f"{path} is not a text file: {error}") from error
    provenance = parsed(path, 1, header, _provenance)
    records = [parsed(path, i, line, _from_json) for i, line in enumerate(lines, start=2)]
    if not records:
        raise RecordsError(f"{path} holds no record")
    return Replay(records, provenance)


def parsed(path: Path, number: int, line: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """Return what `parse` makes of a line of JSON.  Raises RecordsError with file and line."""
    try:
        return parse(json.loads(line))
    except json.JSONDecodeError as error:
        why = f"it is not JSON, {error}"
    except KeyError as error:
        why = f"it has no {error}"
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        why = str(error)
    raise RecordsError(f"{path}, line {number} is not what `slosched replay` writes: {why}")


def _provenance(header: dict[str, Any]) -> dict[str, object]:
    if header["format"] != _FORMAT:
        raise ValueError(f"its format is {header['format']!r}, not {_FORMAT!r}")
    return dict(header["provenance"])


def _line(record: RequestRecord) -> str:
    slo = (record.slo.ttft_s, record.slo.tpot_s, record.slo.e2e_s)
    fields = {
        "request_id": record.request_id,
        "arrival_s": record.arrival_s,
        "num_prompt_tokens": record.num_prompt_tokens,
        "slo_s": [None if s is None or math.isinf(s) else s for s in slo],
        "status": record.status,
        "end_reason": record.end_reason,
        "end_s": record.end_s,
        "token_times_s": list(record.token_times_s),
        "num_preemptions": record.num_preemptions,
        "num_swaps": record.num_swaps,
        "started_s": record.started_s,
        "num_cached_tokens": record.num_cached_tokens,
        "priority": record.priority,
        "lora_id": record.lora_id,
        "tier": record.tier,
        "tenant": record.tenant,
        "session_id": record.session_id,
        "program_s": record.program_s,
        "is_relegated": record.is_relegated,
    }
    return json.dumps(fields) + "\n"


def _from_json(fields: dict[str, Any]) -> RequestRecord:
    ttft_s, tpot_s, e2e_s = fields["slo_s"]
    arrival_s = float(fields["arrival_s"])
    times_s = tuple(map(float, fields["token_times_s"]))
    check_times(arrival_s, times_s)
    reason = fields["end_reason"]
    return RequestRecord(
        request_id=str(fields["request_id"]),
        arrival_s=arrival_s,
        num_prompt_tokens=int(fields["num_prompt_tokens"]),
        num_output_tokens=len(times_s),
        slo=SLO(_or_never(ttft_s), _or_never(tpot_s), e2e_s),
        status=RequestStatus(fields["status"]),
        end_reason=None if reason is None else EndReason(reason),
        token_times_s=times_s,
        end_s=fields["end_s"],
        num_preemptions=int(fields["num_preemptions"]),
        num_swaps=int(fields["num_swaps"]),
        started_s=fields.get("started_s"),
        num_cached_tokens=int(fields.get("num_cached_tokens", 0)),
        priority=int(fields.get("priority", 0)),
        lora_id=fields.get("lora_id"),
        tier=fields.get("tier"),
        tenant=fields.get("tenant"),
        session_id=fields.get("session_id"),
        program_s=fields.get("program_s"),
        is_relegated=bool(fields.get("is_relegated", False)),
    )


def check_times(arrival_s: float, token_times_s: Sequence[float]) -> None:
    """Raise ValueError for times that are not finite, and for tokens out of their order.

    Nothing can be scored with such times, and NaN would just go missing in the percentiles.
    """
    if not math.isfinite(arrival_s):
        raise ValueError(f"its arrival must be a finite number of seconds, not {arrival_s!r}")
    if wrong := [time_s for time_s in token_times_s if not math.isfinite(time_s)]:
        raise ValueError(f"the time of a token must be finite, not {wrong[0]!r}")
    for before_s, after_s in pairwise(token_times_s):
        if after_s < before_s:
            raise ValueError(f"tokens must be in order, but {after_s!r} s follows {before_s!r} s")


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
