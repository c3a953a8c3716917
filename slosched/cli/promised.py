"""What requests were promised, in a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable

from slosched.core import NO_SLO, SLO
from slosched.workload import Trace


def promised(each: Iterable[SLO]) -> str:
    """Return `Promised: TTFT 1 s, TPOT 50 ms.`, with ranges where SLOs differ; "" if none has one.

    It says where some requests have no such time, or none has one: `TTFT 1 s (some have none), no
    TPOT`.
    """
    slos = set(each)
    if not slos - {NO_SLO}:
        return ""
    parts = [
        _range("TTFT", [slo.ttft_s for slo in slos]),
        _range("TPOT", [slo.tpot_s for slo in slos]),
    ]
    if any(slo.e2e_s is not None for slo in slos):
        ends_s = [math.inf if slo.e2e_s is None else slo.e2e_s for slo in slos]
        parts.append(_range("end to end", ends_s))
    return f"Promised: {', '.join(parts)}."


def promised_in(traces: Iterable[Trace]) -> str:
    """Return the same of all requests of some traces."""
    return promised(request.slo for trace in traces for request in trace.requests)


def _range(name: str, times_s: list[float]) -> str:
    had_s = [time_s for time_s in times_s if math.isfinite(time_s)]
    if not had_s:
        return f"no {name}"
    least, most = _time(min(had_s)), _time(max(had_s))
    said = f"{name} {least}" if least == most else f"{name} {least} to {most}"
    return said if len(had_s) == len(times_s) else f"{said} (some have none)"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.4g} s"
