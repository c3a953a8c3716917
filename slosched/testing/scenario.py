"""A small workload on a small replica, which the laws are checked on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from slosched.core import NO_SLO, SLO, Limits, Policy, Request
from slosched.engine.loop import StepRecord
from slosched.kv import NO_PREFIX_HOST, KVCache, PrefixCaching, PrefixHost
from slosched.perfmodel import LinearCoefficients, LinearModel
from slosched.simulator.disturbances import UNDISTURBED, Disturbances
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceRequest

TICK_S = 2.0**-12
"""Every time in a scenario is a multiple of this power of two, so that sums of times are exact and
shifting all of them changes no comparison."""


@dataclass(frozen=True)
class ScenarioRequest:
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    slo: SLO
    abort_at_step: int | None = None
    """The step before which its client goes away."""
    prefix_hashes: tuple[int, ...] = ()
    """Of blocks of `Scenario.prefix_block_tokens` tokens."""


@dataclass(frozen=True)
class Scenario:
    """A small workload on a small replica."""

    requests: tuple[ScenarioRequest, ...]
    num_blocks: int
    block_size: int
    num_host_blocks: int
    limits: Limits
    max_tokens: int
    disturbances: Disturbances = UNDISTURBED
    """Of the simulated device, in `simulated`."""
    prefix_cache: PrefixCaching = PrefixCaching.OFF
    prefix_host: PrefixHost = NO_PREFIX_HOST
    prefix_block_tokens: int | None = None
    overlap: bool = False
    """Whether each step is planned while the one before it runs, in `play`."""

    def shifted(self, seconds: float) -> Scenario:
        """The same scenario, later."""
        return replace(
            self,
            requests=tuple(replace(r, arrival_s=r.arrival_s + seconds) for r in self.requests),
        )

    def unhurried(self) -> Scenario:
        """The same arrivals where nothing is promised and KV blocks abound.

        Only tokens and seats are short; no client goes away, and nothing is shared.
        """
        requests = [
            replace(r, slo=NO_SLO, abort_at_step=None, prefix_hashes=()) for r in self.requests
        ]
        num_tokens = sum(r.num_prompt_tokens + self.max_tokens for r in requests)
        return replace(
            self,
            requests=tuple(requests),
            num_blocks=2 * (len(requests) + num_tokens // self.block_size),
            limits=replace(self.limits, max_num_swapped_blocks=None),
            prefix_cache=PrefixCaching.OFF,
            prefix_host=NO_PREFIX_HOST,
            overlap=False,
        )

    def empty_cache(self) -> KVCache:
        index = self.prefix_cache.new_index()
        return KVCache(
            *(self.num_blocks, self.block_size, self.num_host_blocks, index, self.prefix_host)
        )

    def simulated(
        self, policy: Policy, on_step: Callable[[StepRecord], None] | None = None
    ) -> list[Request]:
        """What becomes of the requests in the simulator, where no client goes away."""
        lines = [
            TraceRequest(
                *(f"r{i}", r.arrival_s, r.num_prompt_tokens, r.num_output_tokens, r.slo),
                prefix_hashes=r.prefix_hashes,
            )
            for i, r in enumerate(self.requests)
        ]
        config = SimulationConfig(
            *(self.limits, self.num_blocks, self.block_size, self.num_host_blocks),
            prefix_cache=self.prefix_cache,
            prefix_host=self.prefix_host,
            disturbances=self.disturbances,
        )
        trace = Trace.of(lines, "scenario", prefix_block_tokens=self.prefix_block_tokens)
        return simulate(trace, policy, device_model(), config, on_step=on_step)


def device_model() -> LinearModel:
    """A device on which a scenario's SLOs are sometimes met and sometimes not."""
    return LinearModel(
        LinearCoefficients(
            per_token_s=TICK_S,
            per_attention_s=TICK_S / 256,
            per_context_s=TICK_S / 64,
            per_tile_s=4 * TICK_S,
            any_decode_s=TICK_S,
            per_swapped_block_s=TICK_S,
            constant_s=8 * TICK_S,
        )
    )
