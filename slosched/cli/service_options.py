"""Options of `serve` for classes of service: tiers, tenants, and SLOs that cannot be kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeVar

import typer

from slosched.core import SLO, OnInfeasible, Policy
from slosched.policy.door import Door
from slosched.policy.floors import Floors
from slosched.workload.service_tier import (
    ServiceTier,
    check_name,
    parse_service_tier,
    parse_share,
)

_T = TypeVar("_T")


class _Tenant(NamedTuple):
    name: str
    key: str
    min_share: float


def parse_tenant(text: str) -> _Tenant:
    """Return the tenant of a text such as "acme=KEY" or "acme=KEY,min-share:0.2".

    Raises ValueError for anything else.
    """
    name, equals, rest = text.partition("=")
    key, comma, share = rest.partition(",")
    label, _, value = share.partition(":")
    try:
        check_name(name)
        if not equals or not key:
            raise ValueError("it has no key")
        if comma and label != "min-share":
            raise ValueError(f"there is no part {share!r}")
        return _Tenant(name, key, parse_share(value) if comma else 0.0)
    except ValueError as error:
        # The text itself is not shown, because it holds a key.
        raise ValueError(
            f"--tenant {name!r}: {error}; write NAME=KEY or NAME=KEY,min-share:0.2"
        ) from None


def _checked(parse: Callable[[str], _T]) -> Callable[[list[str] | None], list[str] | None]:
    """Return a callback of an option that may be repeated; it reports the first wrong value."""

    def check(texts: list[str] | None) -> list[str] | None:
        for text in texts or ():
            try:
                parse(text)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
        return texts

    return check


@dataclass(frozen=True)
class ServiceOptions:
    """The options for classes of service."""

    tier: Annotated[
        list[str] | None,
        typer.Option(
            callback=_checked(parse_service_tier),
            metavar="NAME=PART,…",
            help="A service tier that requests may name: gold=ttft:300ms,tpot:30ms, or "
            "batch=ttft:30s,tpot:1s,best-effort,min-share:0.1.  A request without one is in the "
            "tier `default`, if there is one.  May be repeated.",
        ),
    ] = None
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            callback=_checked(parse_tenant),
            metavar="NAME=KEY[,min-share:SHARE]",
            help="A tenant, the API key of its requests, and the share of the device that they "
            "get at least while they wait: acme=KEY,min-share:0.2.  May be repeated.",
        ),
    ] = None
    on_infeasible: Annotated[
        OnInfeasible,
        typer.Option(
            help="What becomes of a request whose SLO cannot be kept: it is rejected with the "
            "reason (429), served without an SLO behind the others, or served late.  Tiers and "
            "requests may say otherwise."
        ),
    ] = OnInfeasible.REJECT

    def tiers(self) -> dict[str, ServiceTier]:
        """Return the tiers by name; raise ValueError if two have the same."""
        return _by_name("--tier", [parse_service_tier(text) for text in self.tier or ()])

    def tenants(self) -> dict[str, str]:
        """Return the names of tenants by key; raise ValueError if two have the same name or key."""
        tenants = _by_name("--tenant", [parse_tenant(text) for text in self.tenant or ()])
        by_key = {tenant.key: tenant.name for tenant in tenants.values()}
        if len(by_key) < len(tenants):
            raise ValueError(f"--tenant: two of {', '.join(tenants)} have the same key")
        return by_key

    def described(self) -> str:
        """Return the lines that tell the tiers when the server starts; none if there are none."""
        return "".join(f"tier {tier.name}: {_times(tier.slo)}\n" for tier in self.tiers().values())

    def with_floors(self, policy: Policy) -> Policy:
        """Return the policy with the floors of tiers and tenants, inside its door if it has one."""
        of_tiers = {tier.name: tier.min_share for tier in self.tiers().values()}
        of_tenants = {t.name: t.min_share for t in map(parse_tenant, self.tenant or ())}
        tiers, tenants = _floors(of_tiers), _floors(of_tenants)
        if tiers is None and tenants is None:
            return policy
        if isinstance(policy, Door):
            policy.inner = Floors(policy.inner, tiers=tiers, tenants=tenants)
            return policy
        return Floors(policy, tiers=tiers, tenants=tenants)

    def spec_with_floors(self, spec: str) -> str:
        """Return the spec of a policy with the floors of tiers, inside its door if it has one."""
        tiers = _floors({tier.name: tier.min_share for tier in self.tiers().values()})
        if tiers is None:
            return spec
        inner, door, rest = spec.partition("+door")
        return f"{inner}+floors:tiers={tiers}{door}{rest}"


_Named = TypeVar("_Named", ServiceTier, _Tenant)


def _by_name(option: str, items: list[_Named]) -> dict[str, _Named]:
    by_name = {item.name: item for item in items}
    if len(by_name) < len(items):
        names = [item.name for item in items]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{option} {twice} is given twice")
    return by_name


def _floors(shares: Mapping[str, float]) -> str | None:
    return "/".join(f"{name}={share:g}" for name, share in shares.items() if share) or None


def _times(slo: SLO) -> str:
    times_s = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s, "end to end": slo.e2e_s or math.inf}
    told = [f"{name} {seconds:g} s" for name, seconds in times_s.items() if seconds < math.inf]
    return ", ".join(told) or "no SLO"
