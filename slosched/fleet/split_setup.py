"""A fleet with a prefill pool and a decode pool as a value."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from slosched.core import Policy, Request
from slosched.fleet.scaling import Lease, OnLease
from slosched.fleet.setup import FleetSetup
from slosched.fleet.spec import make_router
from slosched.fleet.split import SplitConfig, SplitFleet
from slosched.fleet.view import ReplicaKind
from slosched.simulator.grouped import OnRow
from slosched.workload.trace import Trace


@dataclass(frozen=True)
class SplitSetup:
    """All that a simulated pair of pools depends on, except for the policy in its engines."""

    replicas: tuple[ReplicaKind, ...]
    """The prefill pool, then the decode pool."""
    model_names: tuple[str, ...]
    """The name of each replica's latency model."""
    router: str
    """The spec of the prefill pool's router, as `make_router` reads it."""
    config: SplitConfig

    def simulate(
        self,
        trace: Trace,
        policy: Policy,
        seed: int,
        on_row: OnRow | None = None,
        on_lease: OnLease | None = None,
    ) -> list[Request]:
        """Return the requests of a replay, in order of arrival, all ended."""
        routers = make_router(self.router), make_router(self.config.decode_router)
        fleet = SplitFleet(
            trace, policy, self.replicas, routers, self.config, seed=seed, on_row=on_row
        )
        requests = fleet.play()
        end_s = max(request.end_s for request in requests if request.end_s is not None)
        if on_lease is not None:
            for index, kind in enumerate(self.replicas):
                on_lease(Lease(index, kind.num_gpus, 0.0, 0.0, until_s=end_s))
        return requests

    def provenance(self) -> dict[str, object]:
        """Return what results depend on, by name."""
        config, names = self.config, self.model_names
        return {
            "prefill replicas": _counted(names[: config.num_prefill]),
            "decode replicas": _counted(names[config.num_prefill :]),
            "prefill router": repr(make_router(self.router)),
            "decode router": repr(make_router(config.decode_router)),
            "router delay_s": config.delay_s,
            "decode reserved_tokens": config.reserved_tokens,
            **{f"kv transfer {name}": value for name, value in asdict(config.transfer).items()},
        }


AnyFleet = FleetSetup | SplitSetup


def _counted(names: tuple[str, ...]) -> str:
    return ", ".join(f"{number} x {name}" for name, number in Counter(names).items())
