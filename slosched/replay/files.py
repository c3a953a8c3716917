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
from slosched.core import SLO, TOLERANCE_S, EndReason, RequestStatus, SloschedError
from slosched.metrics import RequestRecord
from slosched.replay.json_fields import Fields, as_object, is_number, shown

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
        return parse(as_object(json.loads(line)))
    except json.JSONDecodeError as error:
        why = f"it is not JSON, {error}"
    except KeyError as error:
        why = f"it has no {error}"
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        why = str(error)
    raise RecordsError(
        f"{path}, line {number} is not what `slosched replay` writes: {why}; mend that line, or "
        "replay again for a new file"
    )


def _provenance(header: dict[str, Any]) -> dict[str, object]:
    if header["format"] != _FORMAT:
        raise ValueError(f"its format is {shown(header['format'])}, not {_FORMAT!r}")
    return dict(Fields(header).inner("provenance"))


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


def _from_json(values: dict[str, Any]) -> RequestRecord:
    fields = Fields(values)
    arrival_s, times_s = fields.number("arrival_s"), tuple(fields.numbers("token_times_s"))
    check_times(arrival_s, times_s)
    has_reason = values["end_reason"] is not None
    return RequestRecord(
        request_id=str(values["request_id"]),
        arrival_s=arrival_s,
        num_prompt_tokens=fields.count("num_prompt_tokens"),
        num_output_tokens=len(times_s),
        slo=_slo(fields),
        status=fields.member("status", RequestStatus),
        end_reason=fields.member("end_reason", EndReason) if has_reason else None,
        token_times_s=times_s,
        end_s=fields.seconds("end_s"),
        num_preemptions=fields.count("num_preemptions"),
        num_swaps=fields.count("num_swaps"),
        started_s=fields.seconds("started_s"),
        num_cached_tokens=fields.count("num_cached_tokens", 0),
        priority=fields.whole("priority", 0),
        lora_id=fields.text("lora_id"),
        tier=fields.text("tier"),
        tenant=fields.text("tenant"),
        session_id=fields.text("session_id"),
        program_s=fields.seconds("program_s"),
        is_relegated=fields.flag("is_relegated"),
    )


def _slo(fields: Fields) -> SLO:
    times_s = fields.values["slo_s"]
    if not (
        isinstance(times_s, list)
        and len(times_s) == 3
        and all(time_s is None or is_number(time_s) for time_s in times_s)
    ):
        raise fields.wrong("slo_s", "a list of TTFT, TPOT and end-to-end time, each may be null")
    ttft_s, tpot_s, e2e_s = times_s
    return SLO(_or_never(ttft_s), _or_never(tpot_s), e2e_s)


def check_times(arrival_s: float, token_times_s: Sequence[float]) -> None:
    """Raise ValueError for times that are not finite, and for tokens out of their order.

    Nothing can be scored with such times: NaN would just go missing in the percentiles, and a token
    before the arrival would be a promise well kept.
    """
    if not math.isfinite(arrival_s):
        raise ValueError(f"its arrival must be a finite number of seconds, not {arrival_s!r}")
    if wrong := [time_s for time_s in token_times_s if not math.isfinite(time_s)]:
        raise ValueError(f"the time of a token must be finite, not {wrong[0]!r}")
    if len(token_times_s) and token_times_s[0] < arrival_s - TOLERANCE_S:
        raise ValueError(
            f"no token may come before the arrival, but one has {token_times_s[0]!r} s, and the "
            f"request arrived at {arrival_s!r} s"
        )
    for before_s, after_s in pairwise(token_times_s):
        if after_s < before_s:
            raise ValueError(f"tokens must be in order, but {after_s!r} s follows {before_s!r} s")


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
