"""A fleet as a value: its replicas, its router, and what happens to it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from slosched.core import Policy, Request
from slosched.fleet.scaling import OnLease, Scaling
from slosched.fleet.simulate import FleetConfig, simulate_fleet
from slosched.fleet.spec import make_router, make_scaler
from slosched.fleet.view import ReplicaKind
from slosched.simulator.grouped import OnRow
from slosched.workload.trace import Trace


@dataclass(frozen=True)
class FleetSetup:
    """All that a simulated fleet depends on, except for the policy in its engines."""

    replicas: tuple[ReplicaKind, ...]
    model_names: tuple[str, ...]
    """The name of each replica's latency model."""
    router: str
    """The router's spec, as `make_router` reads it."""
    config: FleetConfig
    scaling: Scaling | None = None
    """How the number of replicas changes, between a least number and all of them."""

    def simulate(
        self,
        trace: Trace,
        policy: Policy,
        seed: int,
        on_row: OnRow | None = None,
        on_lease: OnLease | None = None,
    ) -> list[Request]:
        """Return the requests of a replay, in order of arrival, all ended."""
        return simulate_fleet(
            trace,
            policy,
            self.replicas,
            make_router(self.router),
            self.config,
            scaling=self.scaling,
            seed=seed,
            on_row=on_row,
            on_lease=on_lease,
        )

    def provenance(self) -> dict[str, object]:
        """Return what results depend on, by name."""
        counts = Counter(self.model_names)
        failures = ", ".join(f"{each.index}@{each.at_s:g}s" for each in self.config.failures)
        scaled: dict[str, object] = {}
        if self.scaling is not None:
            scaled = {
                "fewest replicas": self.scaling.min_replicas,
                "scaler": repr(make_scaler(self.scaling.scaler)),
            }
        return {
            "replicas": ", ".join(f"{number} x {name}" for name, number in counts.items()),
            **scaled,
            "router": repr(make_router(self.router)),
            "router delay_s": self.config.delay_s,
            "replica failures": failures or "none",
            "replica startup_s": self.config.startup_s,
        }
