"""The names of SLO times over HTTP: fields of a request's body, and headers."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from slosched.core import SLO
from slosched.spelling import meant


@dataclass(frozen=True, slots=True)
class PromiseNames:
    """The names of one promised time; its unit is always the millisecond."""

    field: str
    """The name of the field in a request's body."""
    headers: tuple[str, ...]
    """Names in lower case; if a request has several of these headers, the first one here counts."""

    def header_in(self, headers: Container[str]) -> str | None:
        """Return the name of the header that counts, or None if the request has none."""
        return next((name for name in self.headers if name in headers), None)


TTFT = PromiseNames("slo_ttft_ms", ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"))
"""llm-d's header, and its older name, which the Gateway API Inference Extension also reads."""
TPOT = PromiseNames("slo_tpot_ms", ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"))
E2E = PromiseNames("slo_e2e_ms", ("x-slo-e2e-ms",))
"""The time until the last token; llm-d has no header for it."""
PROMISES = (TTFT, TPOT, E2E)
_FIELDS = tuple(names.field for names in PROMISES)
BEST_EFFORT_FIELD = "slo_best_effort"
"""The field with which a client takes an answer without an SLO rather than a refusal."""
BEST_EFFORT_HEADER = "x-slo-best-effort"
"""The header of an answer that had to do without its SLO."""
ON_INFEASIBLE_FIELD = "on_infeasible"
"""The field with which a client says what is to become of a request whose SLO cannot be kept."""
REJECTED = "slo_rejected"
"""The start of the `stop_reason` of a request that a policy in vLLM rejected, before the reason;
our middleware answers with HTTP 429 if no token has come."""
TIER_FIELD = "service_tier"
"""OpenAI's field with the tier of a request."""
TIER_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
"""llm-d's header for the same, and its older name."""
_HEADERS = frozenset({*TIER_HEADERS, *(name for names in PROMISES for name in names.headers)})
TENANT_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
"""llm-d's header with the name of the tenant, and its older name."""


def repeated_header(names: Iterable[str]) -> str | None:
    """Return an SLO or tier header that a request has more than once; None if it has none.

    `names` are those of all its headers, in lower case.
    """
    told = [name for name in names if name in _HEADERS]
    return next((name for name in told if told.count(name) > 1), None)


def asked_slo(asked_s: Callable[[PromiseNames], float | None], default: SLO) -> SLO:
    """Return the SLO of a request that asks for the times of `asked_s`.

    Each time that is None is taken from the default.
    """
    ttft_s, tpot_s, e2e_s = map(asked_s, PROMISES)
    return SLO(
        default.ttft_s if ttft_s is None else ttft_s,
        default.tpot_s if tpot_s is None else tpot_s,
        default.e2e_s if e2e_s is None else e2e_s,
    )


def slo_headers(slo: SLO) -> dict[str, str]:
    """Return the headers of a request with this SLO, under every name that a server may know.

    A time that was not promised gets no header.
    """
    times_s = (slo.ttft_s, slo.tpot_s, math.inf if slo.e2e_s is None else slo.e2e_s)
    return {
        header: repr(seconds * 1000)
        for names, seconds in zip(PROMISES, times_s, strict=True)
        if seconds < math.inf
        for header in names.headers
    }


def unknown_promise(fields: Iterable[str], *others: str) -> tuple[str, str] | None:
    """Return the first unknown field that begins like an SLO field, with a message about it.

    `others` are further known fields with such a beginning.  Returns None if no field is unknown.
    """
    for name in fields:
        if name.startswith("slo_") and name not in _FIELDS and name not in others:
            known = (*_FIELDS, *others)
            shown = f"{name!r:.100}{meant(name[:100], known)}"
            return name, f"there is no promise {shown}; there are {', '.join(known)}"
    return None
