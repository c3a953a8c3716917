"""What requests were promised, in a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable

from slosched.core import NO_SLO, SLO
from slosched.workload import Trace


def promised(each: Iterable[SLO]) -> str:
    """Return `Promised: TTFT 1 s, TPOT 50 ms.`, with ranges where SLOs differ; "" if none has one.

    A time that some requests have and others do not ends at "any".
    """
    slos = set(each)
    if not slos - {NO_SLO}:
        return ""
    parts = [
        f"TTFT {_range([slo.ttft_s for slo in slos])}",
        f"TPOT {_range([slo.tpot_s for slo in slos])}",
    ]
    if any(slo.e2e_s is not None for slo in slos):
        ends_s = [math.inf if slo.e2e_s is None else slo.e2e_s for slo in slos]
        parts.append(f"end to end {_range(ends_s)}")
    return f"Promised: {', '.join(parts)}."


def promised_in(traces: Iterable[Trace]) -> str:
    """Return the same of all requests of some traces."""
    return promised(request.slo for trace in traces for request in trace.requests)


def _range(times_s: list[float]) -> str:
    least, most = _time(min(times_s)), _time(max(times_s))
    return least if least == most else f"{least} to {most}"


def _time(seconds: float) -> str:
    if math.isinf(seconds):
        return "any"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.4g} s"
