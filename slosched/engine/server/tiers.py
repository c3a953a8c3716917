"""The class of service of a request: its tier, and what to do if its SLO cannot be kept.

The tier is taken from the body, else from a header of llm-d.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slosched.core import SLO, OnInfeasible
from slosched.engine.server.config import ServerConfig
from slosched.engine.server.errors import ApiError
from slosched.engine.server.values import Body, flag, shown, wrong
from slosched.workload.http_slo import (
    BEST_EFFORT_FIELD,
    ON_INFEASIBLE_FIELD,
    TIER_FIELD,
    TIER_HEADERS,
)
from slosched.workload.service_tier import ServiceTier

_NO_TIER = ("auto", "default")
"""OpenAI's values that leave the tier to the server."""


@dataclass(frozen=True, slots=True)
class Service:
    """The class of service of one request."""

    tier: str | None
    default_slo: SLO
    """The SLO of the request if it brings none of its own."""
    on_infeasible: OnInfeasible


def parse_service(headers: Mapping[str, str], body: Body, config: ServerConfig) -> Service:
    """Return the class of service that a request asks for.

    Raises ApiError (400) for a tier that the server does not have, and for a wrong value.
    """
    tier = _tier(headers, body, config.tiers)
    of_tier = None if tier is None else tier.on_infeasible
    return Service(
        tier=None if tier is None else tier.name,
        default_slo=config.default_slo if tier is None else tier.slo,
        on_infeasible=_on_infeasible(body, of_tier or config.on_infeasible),
    )


def _tier(
    headers: Mapping[str, str], body: Body, tiers: Mapping[str, ServiceTier]
) -> ServiceTier | None:
    where, asked = TIER_FIELD, body.get(TIER_FIELD)
    name = "auto" if asked is None else asked
    if not isinstance(name, str):
        raise wrong(where, name, "a string")
    if tiers and name == "auto":
        where = next((header for header in TIER_HEADERS if header in headers), where)
        name = headers.get(where, name)
    if name in tiers:
        return tiers[name]
    if name in _NO_TIER:
        return tiers.get("default")
    known = f"it has {', '.join(tiers)}" if tiers else "it has none (--tier)"
    raise ApiError(400, f"{where}={shown(name)} is no tier of this server: {known}", param=where)


def _on_infeasible(body: Body, default: OnInfeasible) -> OnInfeasible:
    asked = body.get(ON_INFEASIBLE_FIELD)
    takes_best_effort = flag(body, BEST_EFFORT_FIELD)
    if asked is None:
        return OnInfeasible.RELEGATE if takes_best_effort else default
    try:
        return OnInfeasible(str(asked))
    except ValueError:
        raise wrong(ON_INFEASIBLE_FIELD, asked, f"one of {', '.join(OnInfeasible)}") from None
