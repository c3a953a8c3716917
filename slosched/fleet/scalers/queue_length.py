"""Queue length: as many replicas as it takes for few requests to wait on each."""

from __future__ import annotations

from dataclasses import dataclass

from slosched.fleet.scaler import FleetState, Scaler, scaled_by_ratio
from slosched.policy.kit.checks import check_positive


@dataclass
class QueueLength(Scaler):
    """Keeps the requests without a first token at `target` for each replica that serves.

    Where nobody waits it wants no replica, so that the fleet shrinks until somebody does.

    Source: the rule of Kubernetes' Horizontal Pod Autoscaler on vLLM's metric
    `num_requests_waiting`, by which vLLM's production stack scales.  That metric leaves out
    requests whose prefill has begun.  This one counts them until their first token is computed.
    """

    target: float = 5.0

    def __post_init__(self) -> None:
        check_positive(target=self.target)
        super().__post_init__()

    def num_wanted(self, state: FleetState) -> int:
        serving = state.replicas
        if not serving:
            return state.num_replicas
        mean = sum(replica.num_waiting for replica in serving) / len(serving)
        return scaled_by_ratio(len(serving), mean, self.target)
