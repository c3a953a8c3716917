"""The SLO of a request inside vLLM: its own `vllm_xargs`, else its tier, else the default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from slosched.core import NO_SLO, SLO, EndReason, OnInfeasible, Refusal, SloschedError
from slosched.integrations.vllm.tenants import Tenants
from slosched.workload import seconds_of_ms
from slosched.workload.http_slo import (
    ON_INFEASIBLE_FIELD,
    REJECTED,
    PromiseNames,
    asked_slo,
    unknown_promise,
)

INVALID = "slo_invalid"
"""The start of the `stop_reason` if the request's SLO cannot be read (HTTP 400)."""

TIER_FIELD = "slo_tier"
TENANT_FIELD = "slo_tenant"
"""The field that says which tenant asks; the middleware sets it."""
_DEFAULT_TIER = "default"
"""The tier of requests that name none, if there is one of this name."""

_DETAIL = re.compile(r";(\w+)=([^;]*)")


def rejection(
    reason: EndReason, refusal: Refusal | None = None, retry_after_s: float | None = None
) -> str:
    """Return the `stop_reason` of a rejected request, with the times that are known.

    For example `slo_rejected:overload;expected_ms=1834;promised_ms=1000;retry_after_ms=7500`.
    """
    if refusal is None and retry_after_s is None:
        return f"{REJECTED}:{reason}"
    times_s = {"retry_after_ms": retry_after_s}
    if refusal is not None:
        times_s = {
            "expected_ms": refusal.expected_s,
            "promised_ms": refusal.promised_s,
            "retry_after_ms": refusal.retry_after_s,
        }
    known = [f";{name}={1000 * time_s:g}" for name, time_s in times_s.items() if time_s is not None]
    return "".join([f"{REJECTED}:{reason}", *known])


def rejection_times_ms(why: str) -> dict[str, float]:
    """Return the times in what follows `slo_rejected:` in a `stop_reason`, by name."""
    return {name: float(value) for name, value in _DETAIL.findall(why)}


class BadPromiseError(SloschedError, ValueError):
    """A request asks for an SLO that is not valid."""


@dataclass(frozen=True, slots=True)
class Promises:
    """The SLO of requests that bring none, and the SLOs of the tiers that requests may name."""

    default: SLO = NO_SLO
    tiers: Mapping[str, SLO] = field(default_factory=dict)
    on_infeasible: OnInfeasible = OnInfeasible.REJECT
    """What becomes of a request whose SLO cannot be kept, if neither it nor its tier says."""
    on_infeasible_of: Mapping[str, OnInfeasible] = field(default_factory=dict)
    """The same for tiers that say."""
    tenants: Tenants = field(default_factory=dict)
    """The tenants that have keys; if there are none, requests name their tenant themselves."""

    def of(self, extra_args: Mapping[str, object] | None) -> SLO:
        """Return the SLO of a request whose `vllm_xargs` are `extra_args`.

        Each of the three times is looked up on its own.  Raises BadPromiseError for a time that is
        not a positive, finite number of milliseconds, for an unknown tier, and for an SLO field of
        any other name.
        """
        default = self.tiers.get(_DEFAULT_TIER, self.default)
        if not extra_args:
            return default
        check_names(extra_args)
        base = self._tier(extra_args[TIER_FIELD]) if TIER_FIELD in extra_args else default
        return asked_slo(partial(_asked_s, extra_args), base)

    def tier_of(self, extra_args: Mapping[str, object] | None) -> str | None:
        """Return the name of the tier that a request is in; None if it is in none."""
        name = (extra_args or {}).get(TIER_FIELD, _DEFAULT_TIER)
        return name if isinstance(name, str) and name in self.tiers else None

    def tenant_of(self, extra_args: Mapping[str, object] | None) -> str | None:
        """Return the name of the tenant that a request comes from; None if that is not known."""
        said = (extra_args or {}).get(TENANT_FIELD)
        if said is None:
            return None
        if not self.tenants:
            return str(said)
        tenant = self.tenants.get(str(said))
        return None if tenant is None else tenant.name

    def when_infeasible(self, extra_args: Mapping[str, object] | None) -> OnInfeasible:
        """Return what becomes of a request if its SLO cannot be kept.

        Raises BadPromiseError for a value that is none.
        """
        asked = (extra_args or {}).get(ON_INFEASIBLE_FIELD)
        if asked is None:
            tier = self.tier_of(extra_args)
            return self.on_infeasible_of.get(tier or "", self.on_infeasible)
        try:
            return OnInfeasible(str(asked))
        except ValueError:
            raise BadPromiseError(
                f"{ON_INFEASIBLE_FIELD} {asked!r:.100} is none of {', '.join(OnInfeasible)}"
            ) from None

    def _tier(self, name: object) -> SLO:
        if not isinstance(name, str) or name not in self.tiers:
            raise BadPromiseError(
                f"{TIER_FIELD} {name!r:.100} is none of this server's tiers: "
                f"{', '.join(self.tiers) or 'it has none'}"
            )
        return self.tiers[name]


def check_names(extra_args: Mapping[str, object]) -> None:
    """Raise BadPromiseError if a field is spelt like an SLO field but is none."""
    if unknown := unknown_promise(extra_args, TIER_FIELD, TENANT_FIELD):
        raise BadPromiseError(unknown[1])


def _asked_s(extra_args: Mapping[str, object], names: PromiseNames) -> float | None:
    value = extra_args.get(names.field)
    return None if value is None else seconds_of(names.field, value)


def seconds_of(name: str, milliseconds: object) -> float:
    """Return a request's time in seconds; raise BadPromiseError if it is not valid."""
    try:
        return seconds_of_ms(name, milliseconds)
    except ValueError as error:
        raise BadPromiseError(str(error)) from None
