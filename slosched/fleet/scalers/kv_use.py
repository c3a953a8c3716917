"""KV use: as many replicas as it takes for their KV caches to be partly free."""

from __future__ import annotations

from dataclasses import dataclass

from slosched.fleet.scaler import FleetState, Scaler, scaled_by_ratio
from slosched.policy.kit.checks import check_positive_share


@dataclass
class KVUse(Scaler):
    """Keeps the used share of the KV blocks at `target`, as a mean over the replicas that serve.

    Blocks that only a prefix cache holds count as free.  Source: the rule of Kubernetes' Horizontal
    Pod Autoscaler on vLLM's metric `kv_cache_usage_perc`.
    """

    target: float = 0.5

    def __post_init__(self) -> None:
        check_positive_share(target=self.target)
        super().__post_init__()

    def num_wanted(self, state: FleetState) -> int:
        serving = state.replicas
        if not serving:
            return state.num_replicas
        mean = sum(replica.kv_use for replica in serving) / len(serving)
        return scaled_by_ratio(len(serving), mean, self.target)
