"""The scenarios that the laws are checked on: a small workload on a small replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from slosched.core import NO_SLO, SLO, Limits, Policy, Request
from slosched.engine.loop import StepRecord
from slosched.kv import NO_PREFIX_HOST, Eviction, Known, KVCache, PrefixCaching, PrefixHost
from slosched.perfmodel import LinearCoefficients, LinearModel
from slosched.simulator.disturbances import UNDISTURBED, Disturbances
from slosched.simulator.drafts import SimulatedDrafts
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceRequest

TICK_S = 2.0**-12
"""The unit of all times in a scenario. It is a power of two, so that sums of times are exact and
shifting all of them changes no comparison."""


@dataclass(frozen=True)
class ScenarioRequest:
    """A request of a scenario, with the number of tokens that it will emit."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    slo: SLO
    abort_at_step: int | None = None
    """The index of the step before which its client cancels it; None if it never does."""
    prefix_hashes: tuple[int, ...] = ()
    """The hashes of its prompt's blocks of `Scenario.prefix_block_tokens` tokens."""
    n: int = 1
    """How many times its prompt is answered."""


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
    """The disturbances of the simulated device; only `simulated` has them."""
    prefix_cache: PrefixCaching = PrefixCaching.OFF
    eviction: Eviction = Eviction.LRU
    prefix_host: PrefixHost = NO_PREFIX_HOST
    prefix_block_tokens: int | None = None
    overlap: bool = False
    """True if `play` has to plan each step while the one before it runs."""
    window_tokens: int | None = None
    """The last tokens that a token sees, if the model has a sliding window."""
    drafts: SimulatedDrafts | None = None
    """Speculative decoding, in `play` alone."""

    def shifted(self, seconds: float) -> Scenario:
        """Return the same scenario with all arrivals later by this many seconds."""
        return replace(
            self,
            requests=tuple(replace(r, arrival_s=r.arrival_s + seconds) for r in self.requests),
        )

    def unhurried(self) -> Scenario:
        """Return a scenario with the same arrivals, no SLOs and more KV blocks than needed.

        Only tokens and seats are short in it. No client cancels, and no prefixes are shared.
        """
        requests = [
            replace(r, slo=NO_SLO, abort_at_step=None, prefix_hashes=()) for r in self.requests
        ]
        num_tokens = sum(r.n * (r.num_prompt_tokens + self.max_tokens) for r in requests)
        num_sequences = sum(r.n for r in requests)
        return replace(
            self,
            requests=tuple(requests),
            num_blocks=2 * (num_sequences + num_tokens // self.block_size),
            limits=replace(self.limits, max_num_swapped_blocks=None),
            prefix_cache=PrefixCaching.OFF,
            eviction=Eviction.LRU,
            prefix_host=NO_PREFIX_HOST,
            overlap=False,
        )

    def empty_cache(self) -> KVCache:
        known = Known(self.num_blocks, self.block_size, device_model())
        return KVCache(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_host_blocks=self.num_host_blocks,
            prefix_index=self.prefix_cache.new_index(self.eviction, known),
            prefix_host=self.prefix_host,
            window_tokens=self.window_tokens,
        )

    def simulated(
        self, policy: Policy, on_step: Callable[[StepRecord], None] | None = None
    ) -> list[Request]:
        """Return the requests after a run in the simulator, in which no client cancels any."""
        return simulate(self.trace(), policy, device_model(), self.config(), on_step=on_step)

    def trace(self) -> Trace:
        """Return the arrivals, without the clients that cancel."""
        lines = [
            TraceRequest(
                request_id=f"r{i}",
                arrival_s=r.arrival_s,
                num_prompt_tokens=r.num_prompt_tokens,
                num_output_tokens=r.num_output_tokens,
                slo=r.slo,
                prefix_hashes=r.prefix_hashes,
                n=r.n,
            )
            for i, r in enumerate(self.requests)
        ]
        return Trace.of(lines, "scenario", prefix_block_tokens=self.prefix_block_tokens)

    def config(self) -> SimulationConfig:
        """Return the simulated replica."""
        return SimulationConfig(
            limits=self.limits,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_host_blocks=self.num_host_blocks,
            prefix_cache=self.prefix_cache,
            eviction=self.eviction,
            prefix_host=self.prefix_host,
            window_tokens=self.window_tokens,
            disturbances=self.disturbances,
        )


def device_model() -> LinearModel:
    """Return a latency model with which a scenario's SLOs are sometimes met and sometimes not."""
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
