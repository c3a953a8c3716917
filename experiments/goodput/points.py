"""The points at which ideas are tried: loads near the knee and beyond it.

Devices, SLOs, traces and noise are those of the arena, but the requests are not those by which the
arena judges.  The windows of Azure's conversations and of Mooncake come after request 9,600, where
the arena judges no policy.  Those of Azure's code are its last 800 requests, on which the arena
tunes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from experiments.arena.scenarios import NOISE, SCENARIOS, Scenario
from slosched.core import Policy, Request
from slosched.evaluate.capacity import Outcomes
from slosched.evaluate.judge.promises import PROMISES
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import simulate
from slosched.workload import Trace

NUM_WINDOWS = 2


@dataclass(frozen=True)
class Point:
    """One scenario at one rate."""

    name: str
    scenario: Scenario
    requests_per_s: float
    num_requests: int = 1000
    first_window: int = 10
    """Place of the first window in the trace, in windows; negative counts from its end."""
    cache_factor: float = 1.0
    """Factor by which the KV cache is smaller than that of the device."""
    tail: float = 0.0
    """Share of steps that are slow, in addition to the arena's noise."""
    unkeepable: float = 0.0
    """Share of the requests with a TPOT of 5 ms, which is less than one decode alone takes."""

    def play(self, policy: Policy, window: int) -> dict[str, float]:
        """Simulate one window under the policy, and return its `shares`."""
        device = self.scenario.device()
        config = self.scenario.config(device)
        config = replace(
            config,
            num_blocks=round(config.num_blocks / self.cache_factor),
            disturbances=Disturbances(NOISE, tail=self.tail),
            seed=window,
        )
        requests = simulate(self.trace(window), policy, device, config)
        good = Outcomes.of(requests, self.scenario.rule).requests["good"]
        return shares(requests, good.tolist())

    def trace(self, window: int) -> Trace:
        seed = self.first_window + window
        rule = PROMISES[self.scenario.promise](self.scenario.device(), abs(seed))
        cut = _cut(self.scenario, self.num_requests, seed)
        trace = cut.scaled_to(self.requests_per_s).with_slo(rule)
        if not self.unkeepable:
            return trace
        drawn = np.random.default_rng(abs(seed)).random(len(trace)) < self.unkeepable
        requests = [
            replace(r, slo=replace(r.slo, tpot_s=0.005)) if is_drawn else r
            for r, is_drawn in zip(trace.requests, drawn, strict=True)
        ]
        return Trace.of(requests, trace.name, trace.provenance)


@lru_cache(maxsize=32)
def _cut(scenario: Scenario, num_requests: int, seed: int) -> Trace:
    (trace,) = scenario.source.windows(num_requests, [seed])
    return trace


def shares(requests: Sequence[Request], good: Sequence[bool]) -> dict[str, float]:
    """Return the shares of good requests, of good prompt tokens, and of the longest tenth."""
    is_good = np.array(good, dtype=np.bool_)
    prompts = np.array([r.num_prompt_tokens for r in requests], dtype=np.float64)
    longest = np.argsort(prompts, kind="stable")[-max(1, len(prompts) // 10) :]
    return {
        "attainment": float(is_good.mean()),
        "good_prompt_tokens": float(prompts[is_good].sum() / prompts.sum()),
        "longest_tenth": float(is_good[longest].mean()),
    }


_TIGHT = SCENARIOS["conv-tight"]
_SMALL = SCENARIOS["conv-mixed-rtx4090"]

POINTS = (
    Point("conv tight 26/s", _TIGHT, 26),
    Point("conv tight 36/s", _TIGHT, 36),
    Point("conv medium 44/s", SCENARIOS["conv-medium"], 44, 800, -2),
    Point("conv relaxed 50/s", SCENARIOS["conv-relaxed"], 50, 1600, 7),
    Point("conv mixed 32/s", SCENARIOS["conv-mixed"], 32),
    Point("code medium 3/s", SCENARIOS["code-medium"], 3, 400, -2),
    Point("Mooncake mixed 1.2/s", SCENARIOS["mooncake-mixed-h200"], 1.2, 160, 60),
    Point("4090 mixed 10/s", _SMALL, 10, 600, 16),
    Point("4090 medium 13/s", replace(_SMALL, promise="medium"), 13, 600, 16),
    Point("cache ÷ 10, 20/s", _TIGHT, 20, cache_factor=10.0),
    Point("slow steps 20/s", _TIGHT, 20, tail=0.1),
    Point("5 ms for a tenth, 24/s", SCENARIOS["conv-medium"], 24, 400, 30, unkeepable=0.1),
    Point("L40S mixed 5/s", replace(_SMALL, model="l40s/llama-3.1-8b"), 5, 400, 30),
)
"""The last four: conv-tight with too small a cache, and with a tenth of the steps slow; a tenth of
the requests promised what cannot be kept; a device on which the smallest TPOT can hardly be kept.
"""
