"""The scenarios as data: devices, traces, SLOs, deadline rules, and the amount of each.

They form a star, not a full product: there is one base, and each scenario changes one thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from slosched.core import DeadlineRule, Limits
from slosched.evaluate.capacity import window
from slosched.evaluate.judge.promises import PROMISES
from slosched.perfmodel import FittedModel, load_model
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace, read_trace, synthesize
from slosched.workload.lengths import Lognormal

TRACES = Path(__file__).parents[3] / "shared" / "traces"
NOISE = 0.05
_TUNING_SEED = 1 << 20
"""The first seed of made-up requests for tuning; those that judge have seeds from 0 on."""


class Source(Protocol):
    """A source of requests, `size` of them for each window."""

    def windows(self, size: int, seeds: Sequence[int]) -> list[Trace]:
        """Return a window for each seed, from the trace's beginning or, below 0, from its end."""


@dataclass(frozen=True)
class Recorded:
    """A public trace, cut into runs that follow one another."""

    file: str
    is_poisson: bool = False
    """Whether the same requests come in the same order, but with Poisson arrivals."""

    def windows(self, size: int, seeds: Sequence[int]) -> list[Trace]:
        path = TRACES / self.file
        if not path.exists():
            raise FileNotFoundError(
                f"the arena needs {path}: see shared/traces/SOURCES.md, or leave this scenario "
                "out with --only"
            )
        whole = _whole(path)
        cut = [window(whole, size, seed) for seed in seeds]
        if not self.is_poisson:
            return cut
        return [w.with_poisson_arrivals(seed=abs(s)) for w, s in zip(cut, seeds, strict=True)]

    def __str__(self) -> str:
        return Path(self.file).stem + (", Poisson arrivals" if self.is_poisson else "")


_whole = lru_cache(maxsize=4)(read_trace)


@dataclass(frozen=True)
class MadeUp:
    """Gamma arrivals (the greater `cv`, the burstier) of requests with lognormal lengths."""

    prompt: Lognormal
    output: Lognormal
    cv: float

    def windows(self, size: int, seeds: Sequence[int]) -> list[Trace]:
        return [
            synthesize(
                "gamma",
                num_requests=size,
                seed=seed if seed >= 0 else _TUNING_SEED - seed,
                cv=self.cv,
                prompt=self.prompt,
                output=self.output,
            )
            for seed in seeds
        ]

    def __str__(self) -> str:
        return (
            f"made up: bursts (CV {self.cv:g}), prompts of {self.prompt.mean_tokens:g} ± "
            f"{self.prompt.cv * self.prompt.mean_tokens:g} tokens"
        )


@dataclass(frozen=True)
class Scale:
    """The amount of simulation."""

    name: str
    num_windows: int
    """Windows that contenders are judged on; each has its own seed of the device's noise, too."""
    window_requests: int
    num_overload_windows: int
    """The length of a window under overload.

    Beyond the knee a queue must reach its full length before a replay counts, so a window of some
    seconds would be too short."""
    overload_requests: int
    num_tuning_windows: int
    tuning_requests: int
    max_trials: int
    """The most settings that are tried of each contender."""
    num_finalists: int | None
    """Finalists of each class, the best in tuning; None for all.  Ours always take part."""
    precision: float
    """The ratio of neighbouring rates of a search, minus 1."""
    num_bound_windows: int
    bound_requests: int


QUICK = Scale("quick", 4, 800, 3, 2200, 2, 400, 8, 1, 0.04, 1, 1000)
MEDIUM = Scale("medium", 4, 2000, 3, 2200, 2, 400, 8, 2, 0.04, 1, 1500)
FULL = Scale("full", 5, 1200, 3, 2200, 2, 1000, 40, None, 0.02, 2, 4000)
SCALES = {scale.name: scale for scale in (QUICK, MEDIUM, FULL)}


@dataclass(frozen=True)
class Scenario:
    """One device, one trace, one set of SLOs and one deadline rule."""

    name: str
    model: str
    source: Source
    promise: str
    rule: DeadlineRule = DeadlineRule.MEAN_TPOT
    size_factor: float = 1.0
    """Requests per window, as a multiple of the scale's; fewer are enough if requests are long."""
    hindsight: bool = False
    """Whether the bound L3 is computed too, which says little on windows of short requests."""

    def __post_init__(self) -> None:
        if self.promise not in PROMISES:
            raise ValueError(f"no promise {self.promise!r}; there are {', '.join(PROMISES)}")

    def device(self) -> FittedModel:
        return load_model(self.model)

    def config(self, model: FittedModel) -> SimulationConfig:
        """Return the replica: 5 % noise, a model corrected online, the KV cache of the device."""
        block_size = 16
        return SimulationConfig(
            limits=Limits(deadline_rule=self.rule),
            num_blocks=int(model.provenance["kv_capacity_tokens"]) // block_size,
            block_size=block_size,
            disturbances=Disturbances(noise=NOISE),
            online=True,
        )

    def tuning_windows(self, scale: Scale) -> list[Trace]:
        """Return windows to tune on, from the end of the trace or with other seeds."""
        seeds = range(-1, -1 - scale.num_tuning_windows, -1)
        return self._windows(scale.tuning_requests, seeds)

    def windows(self, scale: Scale) -> list[Trace]:
        """Return windows to judge on, from the beginning of the trace."""
        return self._windows(scale.window_requests, range(scale.num_windows))

    def overload_windows(self, scale: Scale) -> list[Trace]:
        """Return longer windows from the beginning of the trace."""
        return self._windows(scale.overload_requests, range(scale.num_overload_windows))

    def bound_windows(self, scale: Scale) -> list[Trace]:
        """Return windows from the beginning of the trace, long enough for tight bounds."""
        return self._windows(scale.bound_requests, range(scale.num_bound_windows))

    def _windows(self, size: int, seeds: Sequence[int]) -> list[Trace]:
        rule, model = PROMISES[self.promise], self.device()
        traces = self.source.windows(max(1, round(self.size_factor * size)), seeds)
        return [
            trace.with_slo(rule(model, abs(seed)))
            for trace, seed in zip(traces, seeds, strict=True)
        ]


_CONV, _CODE = Recorded("azure_conv_2023.csv"), Recorded("azure_code_2023.csv")
_MOONCAKE = Recorded("mooncake_conversation.jsonl")
_BURSTY = MadeUp(Lognormal(6000, 1.5), Lognormal(300, 1.0), cv=3.0)
_H100, _H200 = "h100/llama-3.1-8b", "h200/llama-3.1-8b"
_BASE = Scenario("conv-tight", _H100, _CONV, "tight")
_LONG = 0.5

_ALL = (
    _BASE,
    Scenario("code-medium", _H100, _CODE, "medium", hindsight=True),
    Scenario("mooncake-mixed-h200", _H200, _MOONCAKE, "mixed", size_factor=_LONG, hindsight=True),
    replace(_BASE, name="conv-mixed", promise="mixed"),
    replace(_BASE, name="conv-tight-tbt", rule=DeadlineRule.TBT),
    replace(_BASE, name="conv-tight-envelope", rule=DeadlineRule.ENVELOPE),
    replace(_BASE, name="conv-medium", promise="medium"),
    Scenario("code-tight", _H100, _CODE, "tight", hindsight=True),
    replace(_BASE, name="conv-relaxed", promise="relaxed"),
    replace(_BASE, name="conv-proportional", promise="proportional"),
    Scenario("bursty-long-mixed", _H100, _BURSTY, "mixed", size_factor=_LONG, hindsight=True),
    Scenario("conv-mixed-rtx4090", "rtx4090/llama-3.2-3b", _CONV, "mixed"),
    Scenario("conv-tight-h200", _H200, _CONV, "tight"),
    Scenario("conv-medium-70b-tp4", "h100/llama-3.1-70b-tp4", _CONV, "medium"),
    Scenario("conv-tight-poisson", _H100, replace(_CONV, is_poisson=True), "tight"),
    Scenario(
        "mooncake-relaxed-h100", _H100, _MOONCAKE, "relaxed", size_factor=_LONG, hindsight=True
    ),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}
"""The scenarios, the most informative ones first, so that an interrupted run has those."""
LOADS = (1.0, 1.5, 2.0, 3.0)
"""Multiples of the best plain policy's capacity at 90 %."""
