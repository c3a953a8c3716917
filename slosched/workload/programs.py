"""Programs: sessions whose turns wait for each other, and which have a deadline as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from slosched.core import OnInfeasible
from slosched.workload.request import TraceError, TraceRequest


def with_think_times(requests: Sequence[TraceRequest], tpot_s: float) -> list[TraceRequest]:
    """Return the requests, which are in order of arrival, each turn with the pause before it.

    See `Trace.closed_loop`.
    """
    last: dict[str, TraceRequest] = {}
    closed = []
    for request in requests:
        name = request.session_id
        before = None if name is None else last.get(name)
        if name is not None:
            last[name] = request
        if before is not None and request.think_s is None:
            gap_s = request.arrival_s - before.arrival_s
            think_s = round(max(0.0, gap_s - before.num_output_tokens * tpot_s), 6)
            request = replace(request, think_s=think_s)
        closed.append(request)
    return closed


def with_program_deadlines(
    requests: Sequence[TraceRequest], base_s: float, factor: float
) -> list[TraceRequest]:
    """Return the requests with the time that is promised for each whole session.

    See `Trace.with_program_deadlines`.
    """
    if not (0 <= base_s < math.inf and 0 <= factor < math.inf and base_s + factor > 0):
        raise ValueError(
            "the time of a program needs a positive, finite base or factor, not "
            f"{base_s!r} s and {factor!r}"
        )
    beside_s = _beside_base_s(requests, factor)
    if not beside_s:
        raise TraceError(
            "a deadline for whole programs needs sessions: use a trace with a column session_id, "
            "or the kind agents"
        )
    program_s = {name: base_s + seconds for name, seconds in beside_s.items()}
    return list(_promised(requests, program_s))


def with_moved_programs(
    before: Sequence[TraceRequest], after: Sequence[TraceRequest], factor: float
) -> list[TraceRequest]:
    """Return the requests `after` their arrivals were moved, each program with its new pauses.

    The time promised for a program holds the pauses until turns that arrive at their own times, so
    it changes with them.  `factor` is the one with which the times were promised, 0 if unknown.
    """
    if all(request.program_s is None for request in before):
        return list(after)
    if not all(_may_take_s(r) < math.inf for r in before if r.session_id is not None):
        factor = 0.0
    was_s, is_s = _beside_base_s(before, factor), _beside_base_s(after, factor)
    return [
        r
        if r.program_s is None or r.session_id is None
        else replace(r, program_s=max(0.0, r.program_s + is_s[r.session_id] - was_s[r.session_id]))
        for r in after
    ]


def _beside_base_s(requests: Sequence[TraceRequest], factor: float) -> dict[str, float]:
    """Return what is promised for each session beside the base: its pauses and its turns."""
    beside_s: dict[str, float] = {}
    first_s: dict[str, float] = {}
    for request in requests:
        name = request.session_id
        if name is None:
            continue
        if name not in beside_s:
            beside_s[name], first_s[name], pause_s = 0.0, request.arrival_s, 0.0
        elif request.think_s is not None:
            pause_s = request.think_s
        else:  # it arrives at its own time, and the turns before may take until then
            pause_s = max(0.0, request.arrival_s - first_s[name] - beside_s[name])
        promised_s = factor * _promised_s(request) if factor else 0.0
        beside_s[name] += promised_s + pause_s
    return beside_s


def _promised(
    requests: Sequence[TraceRequest], program_s: Mapping[str, float]
) -> Iterator[TraceRequest]:
    """Yield the requests with the time of their programs; those behind the first are relegated."""
    begun: set[str] = set()
    for request in requests:
        name = request.session_id
        if name is None:
            yield request
            continue
        on_infeasible = request.on_infeasible
        if name in begun and on_infeasible is OnInfeasible.REJECT:
            on_infeasible = OnInfeasible.RELEGATE
        begun.add(name)
        yield replace(request, program_s=program_s[name], on_infeasible=on_infeasible)


def _promised_s(request: TraceRequest) -> float:
    """Return how long the request may take at its TTFT and TPOT; raise TraceError for no limit."""
    promised_s = _may_take_s(request)
    if not promised_s < math.inf:
        raise TraceError(
            f"request {request.request_id!r} has no TTFT or no TPOT, so no multiple of its time "
            "can be promised for its program: promise both, or give the program's time in seconds"
        )
    return promised_s


def _may_take_s(request: TraceRequest) -> float:
    return request.slo.ttft_s + (request.num_output_tokens - 1) * request.slo.tpot_s
