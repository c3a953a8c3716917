"""Options for several replicas behind a router."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.pools import PoolOptions
from slosched.evaluate.comparison import Replica
from slosched.fleet.routers import ROUTERS
from slosched.fleet.scalers import SCALERS
from slosched.fleet.scaling import DEFAULT_STARTUP_S, Scaling
from slosched.fleet.setup import FleetSetup
from slosched.fleet.simulate import Failure, FleetConfig
from slosched.fleet.spec import make_router, make_scaler
from slosched.fleet.split import check_pools
from slosched.fleet.split_setup import AnyFleet, SplitSetup
from slosched.fleet.view import ReplicaKind
from slosched.workload import parse_duration

_DEFAULT_ROUTER = "round_robin"
_DEFAULT_SCALER = "predicted"


@dataclass(frozen=True)
class Group:
    """Equal replicas of a fleet."""

    num_replicas: int
    model_name: str | None
    """The latency model; None for that of --latency-model."""


def replica_groups(text: str, option: str = "--replicas") -> list[Group]:
    """Return the groups of "4" or "2:h100/llama-3.1-8b,2:l40s/llama-3.1-8b"."""
    groups = []
    for part in text.split(","):
        number, colon, name = part.strip().partition(":")
        if not number.isdecimal() or int(number) < 1 or (colon and not name):
            raise ValueError(
                f"{option} {text!r}: {part!r} is not NUM or NUM:MODEL with at least one replica, "
                "as in 4 or 2:h100/llama-3.1-8b,2:l40s/llama-3.1-8b"
            )
        groups.append(Group(int(number), name or None))
    return groups


def least_and_most(text: str) -> tuple[int | None, str]:
    """Return 2 and "8:h100/llama-3.1-8b" for "2..8:h100/llama-3.1-8b".

    The first is None if the number of replicas is fixed.  Raises ValueError if the replicas that
    are scaled are of several kinds, or fewer at most than at least.
    """
    least, dots, most = text.partition("..")
    if not dots:
        return None, text
    if "," in text:
        raise ValueError(
            f"--replicas {text!r}: replicas that are scaled are of one kind, as in "
            "2..8:h100/llama-3.1-8b"
        )
    number = most.partition(":")[0]
    if not (least.isdecimal() and number.isdecimal() and 1 <= int(least) <= int(number)):
        raise ValueError(
            f"--replicas {text!r} is not MIN..MAX or MIN..MAX:MODEL with at least one replica and "
            "at most as many as MAX, as in 2..8"
        )
    return int(least), most


def failure(text: str) -> Failure:
    """Return the failure that a text such as "1@30s" means; raise ValueError for any other."""
    index, at, time = text.partition("@")
    if not at or not index.isdecimal():
        raise ValueError(f"--fail {text!r} is not REPLICA@TIME, as in 1@30s")
    try:
        return Failure(parse_duration(time), int(index))
    except ValueError as error:
        raise ValueError(f"--fail {text!r}: {error}") from None


@dataclass(frozen=True)
class FleetOptions(PoolOptions):
    """The options for replicas behind a router."""

    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="NUM[:MODEL][,…]",
            help="Simulate this many replicas behind a router: 4, or "
            "2:h100/llama-3.1-8b,2:l40s/llama-3.1-8b for a fleet of unequal devices, or 2..8 for "
            "as many as --scaler decides.  Default: one replica without a router.",
        ),
    ] = None
    scaler: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:option=value,…]",
            help="What starts and closes replicas between the limits of --replicas 2..8: "
            f"{', '.join(SCALERS)}.  `compare` and `capacity` take several.  Default: "
            f"{_DEFAULT_SCALER}.",
        ),
    ] = None
    router: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:option=value,…]",
            help=f"What sends requests to --replicas: {', '.join(ROUTERS)}.  `compare` and "
            f"`capacity` take several, and play each policy behind each.  Default: "
            f"{_DEFAULT_ROUTER}.",
        ),
    ] = None
    router_delay: Annotated[
        float | None,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="How old the state of the replicas is that the router sees: 100ms.  "
            "Default: none.",
        ),
    ] = None
    fail: Annotated[
        # Parsed later: typer has no lists of parsed values such as `Failure`.
        list[str] | None,
        typer.Option(
            metavar="REPLICA@TIME",
            help="Let a replica fail: 1@30s.  Requests that have begun to answer are aborted, the "
            "others go elsewhere.  Replicas are counted from 0.  May be repeated.",
        ),
    ] = None
    startup: Annotated[
        float | None,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="Time after which a replica that failed is back, with an empty KV cache, and "
            "after which a new one of --scaler takes requests: 45s.  Default: a failed one never "
            f"is; a new one takes {DEFAULT_STARTUP_S:g}s.",
        ),
    ] = None

    @property
    def routers(self) -> list[str]:
        """Return the specs of the routers, each once; none without a fleet."""
        if self.replicas is None and self.prefill_replicas is None:
            return []
        return list(dict.fromkeys(self.router or [_DEFAULT_ROUTER]))

    @property
    def scalers(self) -> list[str]:
        """Return the specs of the scalers, each once; none if the number of replicas is fixed."""
        if self.replicas is None or least_and_most(self.replicas)[0] is None:
            return []
        return list(dict.fromkeys(self.scaler or [_DEFAULT_SCALER]))

    def open(self, open_replica: Callable[[str | None], Replica]) -> Replica:
        """Return the first replica of the fleet, which knows the others, or the only one.

        `open_replica` returns a replica by the name of its latency model.
        """
        if self.has_pools:
            return self._open_pools(open_replica)
        if self.replicas is None:
            self._check_unused()
            return open_replica(None)
        least, most = least_and_most(self.replicas)
        found = _opened(most, "--replicas", open_replica)
        failures = tuple(map(failure, self.fail or ()))
        if least is None and self.scaler:
            raise ValueError("--scaler needs to know between how many replicas: --replicas 2..8")
        startup_s = self.startup
        if startup_s is None:
            startup_s = math.inf if least is None else DEFAULT_STARTUP_S
        config = FleetConfig(self.router_delay or 0.0, failures, startup_s)
        config.check_failures(len(found))
        for router in self.routers:
            make_router(router)
        for scaler in self.scalers:
            make_scaler(scaler)
        setup = FleetSetup(
            tuple(ReplicaKind(one.model, one.config) for one in found),
            tuple(one.model_name for one in found),
            self.routers[0],
            config,
            None if least is None else Scaling(self.scalers[0], least),
        )
        return replace(found[0], fleet=setup)

    def variants(self, fleet: AnyFleet) -> dict[str, AnyFleet]:
        """Return the fleet behind each router and with each scaler, by what tells them apart."""
        found: dict[str, AnyFleet] = {}
        for router in self.routers:
            behind = f" behind {router}" if len(self.routers) > 1 else ""
            routed: AnyFleet = replace(fleet, router=router)
            if not isinstance(routed, FleetSetup) or routed.scaling is None:
                found[behind] = routed
                continue
            for scaler in self.scalers:
                scaled_by = f" scaled by {scaler}" if len(self.scalers) > 1 else ""
                scaling = replace(routed.scaling, scaler=scaler)
                found[behind + scaled_by] = replace(routed, scaling=scaling)
        return found

    def _open_pools(self, open_replica: Callable[[str | None], Replica]) -> Replica:
        """Return the first replica of the prefill pool, which knows both pools."""
        if self.replicas or self.fail or self.scaler or self.startup is not None:
            raise ValueError(
                "--replicas, --scaler, --fail and --startup are for replicas that prefill and "
                "decode; leave them out with --prefill-replicas"
            )
        assert self.prefill_replicas is not None
        assert self.decode_replicas is not None
        prefill = _opened(self.prefill_replicas, "--prefill-replicas", open_replica)
        decode = _opened(self.decode_replicas, "--decode-replicas", open_replica)
        both = [*prefill, *decode]
        config = self.split_config(len(prefill), both[0].model, self.router_delay or 0.0)
        for router in (*self.routers, config.decode_router):
            make_router(router)
        kinds = tuple(ReplicaKind(one.model, one.config) for one in both)
        check_pools(kinds, config)
        names = tuple(one.model_name for one in both)
        return replace(both[0], fleet=SplitSetup(kinds, names, self.routers[0], config))

    def _check_unused(self) -> None:
        """Raise ValueError if an option is given that is only for a fleet."""
        given = {
            "--router": self.router,
            "--router-delay": self.router_delay,
            "--scaler": self.scaler,
            "--fail": self.fail,
            "--startup": self.startup,
        }
        for name, value in given.items():
            if value:
                raise ValueError(f"{name} is for several replicas; add --replicas 4")


def _opened(text: str, option: str, open_replica: Callable[[str | None], Replica]) -> list[Replica]:
    """Return the replicas that the value of an option names."""
    found = []
    for group in replica_groups(text, option):
        found += [open_replica(group.model_name)] * group.num_replicas
    return found
