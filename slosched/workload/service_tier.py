"""Service tiers: named SLOs that an operator offers, and what else holds for their requests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from slosched.core import NO_SLO, SLO, OnInfeasible
from slosched.spelling import meant
from slosched.workload.slo import parse_promised

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PARTS = ("ttft", "tpot", "e2e", "min-share", "on-infeasible", "best-effort")
_EXAMPLE = "gold=ttft:300ms,tpot:30ms or batch=ttft:30s,tpot:1s,best-effort,min-share:0.1"


@dataclass(frozen=True, slots=True)
class ServiceTier:
    """A class of service, which a request names."""

    name: str
    slo: SLO = NO_SLO
    """The SLO of its requests that bring none of their own."""
    on_infeasible: OnInfeasible | None = None
    """What becomes of its requests whose SLO cannot be kept; None if the server decides."""
    min_share: float = 0.0
    """The share of the device that its requests get at least while some of them wait."""


def parse_service_tier(text: str) -> ServiceTier:
    """Return the tier of a text such as "gold=ttft:300ms,tpot:30ms".

    The parts are `ttft`, `tpot` and `e2e` (times), `min-share` (0.1 for a tenth of the device),
    `on-infeasible` (reject, relegate or serve), and `best-effort`, which is short for
    `on-infeasible:relegate`.  Raises ValueError for anything else.
    """
    name, equals, rest = text.partition("=")
    try:
        if not equals:
            raise ValueError("it has no name")
        check_name(name.strip())
        return _tier(name.strip(), filter(None, (part.strip() for part in rest.split(","))))
    except ValueError as error:
        raise ValueError(f"{text!r} is no tier: {error}; write {_EXAMPLE}") from None


def check_name(name: str) -> None:
    """Raise ValueError unless a tier or a tenant may have this name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name {name!r} must be letters, digits, dots, dashes and underscores")


def parse_share(text: str | float) -> float:
    """Return a share in (0, 1); raise ValueError for anything else."""
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise ValueError(f"a share must be between 0 and 1, as 0.1 for a tenth, not {text!r}")
    return share


def _tier(name: str, parts: Iterable[str]) -> ServiceTier:
    times_s: dict[str, float] = {}
    on_infeasible, min_share = None, 0.0
    seen: set[str] = set()
    for part in parts:
        key, _, value = part.partition(":")
        if key in seen:
            raise ValueError(f"it has two parts {key}")
        seen.add(key)
        match key:
            case "ttft" | "tpot" | "e2e":
                times_s[key] = parse_promised(value)
            case "min-share":
                min_share = parse_share(value)
            case "on-infeasible":
                on_infeasible = _on_infeasible(value.strip())
            case "best-effort":
                if value:
                    raise ValueError(f"best-effort stands alone, without {value.strip()!r}")
                on_infeasible = OnInfeasible.RELEGATE
            case _:
                raise ValueError(f"there is no part {part!r}{meant(key, _PARTS)}")
    slo = SLO(times_s.get("ttft", math.inf), times_s.get("tpot", math.inf), times_s.get("e2e"))
    return ServiceTier(name, slo, on_infeasible, min_share)


def _on_infeasible(text: str) -> OnInfeasible:
    """Return the choice that a text names; raise ValueError, which lists all, if it names none."""
    if text not in list(OnInfeasible):
        raise ValueError(
            f"on-infeasible must be one of {', '.join(OnInfeasible)}, not {text!r}"
            f"{meant(text, OnInfeasible)}"
        )
    return OnInfeasible(text)
