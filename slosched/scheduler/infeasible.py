"""What becomes of a request whose SLO cannot be kept, unless it is rejected."""

from __future__ import annotations

from slosched.core import NO_SLO, SLO, EndReason, OnInfeasible, Request

_BECAUSE_OF_SLO = frozenset(
    {
        EndReason.EXPIRED,
        EndReason.INFEASIBLE,
        EndReason.CASCADE,
        EndReason.OVERLOAD,
        EndReason.UNKEEPABLE,
    }
)
_MOST_TIMES_EASED = 2**20
"""A policy that rejects a request even with so many times its TTFT does not look at its SLO."""


def eased_slo(request: Request, reason: EndReason) -> SLO | None:
    """Return the SLO by which a request that a policy rejects is served; None if it ends.

    A relegated request has no SLO.  One that is to be served in any case gets twice its times, as
    often as the policy rejects it, so that a policy that goes by deadlines finds it a place.
    """
    if request.on_infeasible is OnInfeasible.REJECT or reason not in _BECAUSE_OF_SLO:
        return None
    if request.on_infeasible is OnInfeasible.RELEGATE:
        return None if request.slo == NO_SLO else NO_SLO
    slo, asked = request.slo, request.asked_slo or request.slo
    if not slo.ttft_s < _MOST_TIMES_EASED * asked.ttft_s:
        return None
    return SLO(2 * slo.ttft_s, 2 * slo.tpot_s, slo.e2e_s)
