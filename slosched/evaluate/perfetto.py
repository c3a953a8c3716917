"""A replay as a trace for ui.perfetto.dev and chrome://tracing: every step and every request.

The file is JSON in Chrome's Trace Event Format, compressed if its name ends in `.gz`.  Both
viewers open both kinds.  Requests are put into as few lanes as hold them without overlap, so that
the number of lanes in use is the number of requests in the system.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from slosched.core import DeadlineRule, RequestStatus
from slosched.metrics import RequestColumns, RequestRecord, StepRow, good_requests

Event = dict[str, Any]

_DEVICE, _REQUESTS = 1, 2
"""Process ids of the two processes that the viewer shows."""
_COMPRESSION = 5


def write_perfetto(
    path: str | Path,
    records: Sequence[RequestRecord],
    steps: Sequence[StepRow],
    rule: DeadlineRule,
    provenance: Mapping[str, object] | None = None,
) -> None:
    """Write the trace and make its folder.  If there are no steps, only requests are shown."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path) as file:
        facts = json.dumps(dict(provenance or {}), default=str)
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {facts}, "traceEvents": [\n')
        for i, event in enumerate(trace_events(records, steps, rule)):
            file.write((",\n" if i else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def trace_events(
    records: Sequence[RequestRecord], steps: Sequence[StepRow], rule: DeadlineRule
) -> Iterator[Event]:
    """Yield the names of processes and lanes, then all other events in order of time.

    Times count from the first arrival.  Slices (`ph` X) nest: a step stands alone, while a request
    encloses its waiting, prefill and decode.  Counters (C) show batch tokens, requests and KV
    cache.  A rejection also has an instant (i).  Raises ValueError if there are no requests.
    """
    if not records:
        raise ValueError("there are no requests to trace: the replay offered none")
    zero_s = min([r.arrival_s for r in records] + [s.start_s for s in steps[:1]])
    last_s = max(map(_last_known_s, records))
    ends_s = [_end_s(record, last_s) for record in records]
    lanes = _lanes([record.arrival_s for record in records], ends_s)
    good = good_requests(RequestColumns.of(records), rule)
    spans = [
        event
        for record, end_s, lane, is_good in zip(records, ends_s, lanes, good, strict=True)
        for event in _request_events(record, end_s, lane, bool(is_good), zero_s)
    ]
    # Of slices that begin at the same time, the longest has to come first: it encloses the others.
    spans.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    yield from _names(max(lanes) + 1, has_steps=bool(steps))
    yield from heapq.merge(_step_events(steps, zero_s), spans, key=lambda event: event["ts"])


def _request_events(
    record: RequestRecord, end_s: float, lane: int, is_good: bool, zero_s: float
) -> Iterator[Event]:
    outcome = "good" if is_good else _outcome(record)
    about: dict[str, object] = {
        "outcome": outcome,
        "prompt tokens": record.num_prompt_tokens,
        "output tokens": record.num_output_tokens,
        "TTFT (s)": record.ttft_s,
        "TPOT (s)": record.tpot_s,
        "preemptions": record.num_preemptions,
        "swaps": record.num_swaps,
    }
    where = {"pid": _REQUESTS, "tid": lane + 1}
    name = f"{record.request_id}: {outcome}"
    yield _slice(name, record.arrival_s, end_s, zero_s, **where, args=about)
    for phase, start_s, stop_s in _phases(record, end_s):
        yield _slice(phase, start_s, stop_s, zero_s, **where)
    if record.status is RequestStatus.REJECTED:
        yield {"name": outcome, "ph": "i", "s": "t", "ts": _us(end_s - zero_s), **where}


def _phases(record: RequestRecord, end_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield the name, begin and end of each phase of a request's life."""
    times_s, started_s = record.token_times_s, record.started_s
    first_s = times_s[0] if times_s else end_s
    if started_s is not None:
        yield "waiting", record.arrival_s, started_s
        yield "prefill", started_s, first_s
    else:
        yield ("waiting and prefill" if times_s else "waiting"), record.arrival_s, first_s
    if len(times_s) > 1:
        yield "decode", first_s, times_s[-1]


def _outcome(record: RequestRecord) -> str:
    if record.status is RequestStatus.FINISHED:
        return "late"
    reason = f", {record.end_reason}" if record.end_reason else ""
    return f"{record.status}{reason}"


def _step_events(steps: Sequence[StepRow], zero_s: float) -> Iterator[Event]:
    for step in steps:
        at: Event = {"ts": _us(step.start_s - zero_s), "pid": _DEVICE}
        tokens = {"prefill": step.num_prefill_tokens, "decode": step.num_decodes}
        queues = {
            "running": step.num_running,
            "waiting": step.num_waiting,
            "swapped": step.num_swapped,
        }
        about = {**tokens, "predicted (s)": step.predicted_s, "rejected": step.num_rejected}
        end_s = step.start_s + step.duration_s
        yield _slice(_kind(step), step.start_s, end_s, zero_s, pid=_DEVICE, tid=1, args=about)
        yield {"name": "batch tokens", "ph": "C", **at, "args": tokens}
        yield {"name": "requests", "ph": "C", **at, "args": queues}
        yield {"name": "KV cache (%)", "ph": "C", **at, "args": {"used": _percent(step)}}


def _kind(step: StepRow) -> str:
    if step.num_decodes:
        return "mixed" if step.num_prefill_tokens else "decode"
    return "prefill" if step.num_prefill_tokens else "nothing computed"


def _percent(step: StepRow) -> float:
    return round(100 * step.kv_used_fraction, 2)


def _names(num_lanes: int, *, has_steps: bool) -> Iterator[Event]:
    if has_steps:
        yield _name("process_name", _DEVICE, 0, "device")
        yield _name("thread_name", _DEVICE, 1, "steps")
    yield _name("process_name", _REQUESTS, 0, "requests")
    for lane in range(num_lanes):
        yield _name("thread_name", _REQUESTS, lane + 1, f"lane {lane + 1}")


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, start_s: float, end_s: float, zero_s: float, **more: Any) -> Event:
    start_us, end_us = _us(start_s - zero_s), _us(end_s - zero_s)
    return {"name": name, "ph": "X", "ts": start_us, "dur": round(end_us - start_us, 3), **more}


def _us(seconds: float) -> float:
    """Convert to microseconds, the unit of the format, and round to the nanosecond."""
    return round(seconds * 1e6, 3)


def _end_s(record: RequestRecord, last_s: float) -> float:
    """Return when the request left; if it has not, the last time that anything is known of."""
    return _last_known_s(record) if record.status.is_ended else last_s


def _last_known_s(record: RequestRecord) -> float:
    end_s = -math.inf if record.end_s is None else record.end_s
    return max([record.arrival_s, end_s, *record.token_times_s[-1:]])


def _lanes(starts_s: Sequence[float], ends_s: Sequence[float]) -> list[int]:
    """Give each request, in order of arrival, the lowest lane that is free until its end."""
    lanes = [0] * len(starts_s)
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    num_lanes = 0
    for i in sorted(range(len(starts_s)), key=starts_s.__getitem__):
        while taken and taken[0][0] <= starts_s[i]:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if not free:
            free.append(num_lanes)
            num_lanes += 1
        lanes[i] = heapq.heappop(free)
        heapq.heappush(taken, (ends_s[i], lanes[i]))
    return lanes


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        # Without the time of writing, the same replay gives the same bytes.
        return TextIOWrapper(gzip.GzipFile(path, "wb", _COMPRESSION, mtime=0), encoding="utf-8")
    return path.open("w", encoding="utf-8")
