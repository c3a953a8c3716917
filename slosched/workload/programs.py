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
    program_s: dict[str, float] = {}
    first_s: dict[str, float] = {}
    for request in requests:
        name = request.session_id
        if name is None:
            continue
        if name not in program_s:
            program_s[name], first_s[name], pause_s = base_s, request.arrival_s, 0.0
        elif request.think_s is not None:
            pause_s = request.think_s
        else:  # it arrives at its own time, and the turns before may take until then
            passed_s = request.arrival_s - first_s[name]
            pause_s = max(0.0, passed_s - (program_s[name] - base_s))
        promised_s = factor * _promised_s(request) if factor else 0.0
        program_s[name] += promised_s + pause_s
    if not program_s:
        raise TraceError(
            "a deadline for whole programs needs sessions: use a trace with a column session_id, "
            "or the kind agents"
        )
    return list(_promised(requests, program_s))


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
    """Return how long the request may take at its TTFT and TPOT."""
    slo = request.slo
    promised_s = slo.ttft_s + (request.num_output_tokens - 1) * slo.tpot_s
    if not promised_s < math.inf:
        raise TraceError(
            f"request {request.request_id!r} has no TTFT or no TPOT, so no multiple of its time "
            "can be promised for its program: promise both, or give the program's time in seconds"
        )
    return promised_s
