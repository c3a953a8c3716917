"""The replays: every policy at its own knee, undisturbed and under every disturbance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import pandas as pd

from experiments.arena.scenarios import QUICK, SCENARIOS, Scenario
from experiments.robustness.kinds import Kind, kinds
from experiments.robustness.losses import Compared, loss
from slosched.evaluate.bounds import Pace
from slosched.evaluate.capacity import (
    Bench,
    CapacityError,
    Contender,
    Outcomes,
    Plan,
    Point,
    Store,
    Study,
    Sweep,
    local_pool,
)
from slosched.evaluate.capacity.point import model_digest, trace_digest
from slosched.evaluate.capacity.pool import give, run_point
from slosched.perfmodel import FittedModel
from slosched.simulator.disturbances import UNDISTURBED
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace

POLICIES = (
    "goodput",
    "slo_aware",
    "sarathi:drop=infeasible,token_budget=768",
    "edf:drop=infeasible,token_budget=768",
    "qoserve",
    "fairbatching:deadlines=run",
    "slidebatching:deadlines=run,margin=0.05",
    "slosserve",
    "slai:deadlines=run",
)
"""The policies with their settings, which are not tuned for each workload as in the arena.

Here a loss is relative to the same policy.  So all settings are the defaults, with two exceptions:
each policy uses the deadlines by which it is judged, and the baselines have the token budget of
256 to 2048 that served `conv-tight` best."""
TARGETS = (0.99, 0.9)
"""A policy is played at the highest rate at which it reaches the first target.

If it never does, the second target is used."""

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Workload:
    """A scenario of the arena, and the factors of a small cache for it."""

    scenario: Scenario
    small_caches: Sequence[float]


WORKLOADS = (
    Workload(SCENARIOS["conv-tight"], (4, 8)),
    Workload(SCENARIOS["code-medium"], (24, 40)),
)


@dataclass(frozen=True)
class Scale:
    """The amount of simulation."""

    num_windows: int = 4
    window_requests: int = 600
    precision: float = 0.04
    """The ratio of neighbouring rates in the search for the knees, minus 1."""


@dataclass(frozen=True)
class Arm:
    """A policy with one disturbance; at the kind's neutral strength it is undisturbed."""

    policy: str
    kind: Kind
    variant: str
    strength: float


@dataclass
class WorkloadStudy:
    """All replays of one workload."""

    workload: Workload
    policies: Sequence[str]
    scale: Scale
    store: Store
    jobs: int | None = None
    only: Sequence[str] | None = None
    """Names of the kinds to play; None for all."""
    _outcomes: dict[str, Outcomes] = field(default_factory=dict)
    """Outcomes by the key of the point."""

    def rates(self, on_progress: OnProgress) -> pd.DataFrame:
        """Return each policy's knee: the highest rate at which it serves nearly all in time.

        Raises CapacityError if a policy serves 90 % in time at no rate.
        """
        rows: dict[str, dict[str, object]] = {}
        for target in TARGETS:
            left = [policy for policy in self.policies if policy not in rows]
            rows |= self._knees(left, target, on_progress) if left else {}
        if missing := [policy for policy in self.policies if policy not in rows]:
            raise CapacityError(
                f"{self._name}: {', '.join(missing)} serve {TARGETS[-1]:.0%} in time at no rate"
            )
        return pd.DataFrame([rows[policy] for policy in self.policies])

    def losses(self, rates: pd.DataFrame, on_progress: OnProgress) -> pd.DataFrame:
        """Return a row for each policy and disturbance."""
        rate_of = dict(zip(rates["policy"], rates["requests_per_s"], strict=True))
        arms = [arm for policy in self.policies for arm in self._arms(policy)]
        self._play([p for arm in arms for p in self._points(arm, rate_of[arm.policy])], on_progress)
        rows = []
        for arm in arms:
            if arm.strength == arm.kind.neutral:
                continue
            calm = replace(arm, strength=arm.kind.neutral)
            rate = rate_of[arm.policy]
            compared = [
                Compared(window, self._outcomes[before.key], self._outcomes[after.key])
                for window, before, after in zip(
                    self._windows, self._points(calm, rate), self._points(arm, rate), strict=True
                )
            ]
            facts: dict[str, object] = {
                "workload": self._name,
                "policy": arm.policy,
                "kind": arm.kind.name,
                "variant": arm.variant,
                "strength": arm.strength,
            }
            rows.append(facts | loss(compared)._asdict())
        return pd.DataFrame(rows)

    def lasting(self, rates: pd.DataFrame, on_progress: OnProgress) -> pd.DataFrame:
        """Return the share that any schedule can serve in time with each smaller KV cache.

        It is that of L5, at the knee of the first policy: for windows that are repeated without
        end.  Takes some 15 s for each window and cache.
        """
        rate = float(rates.loc[rates["policy"] == self.policies[0], "requests_per_s"].iloc[0])
        (kind,) = (k for k in kinds(self.workload.small_caches) if k.name == "kv")
        rows: list[dict[str, object]] = []
        num_bounds = len(kind.strengths) * len(self._windows)
        for strength in kind.strengths:
            config = kind.change(self._calm, kind.variants[0], strength)
            shares: list[float] = []
            for window in self._windows:
                on_progress(len(rows) * len(self._windows) + len(shares), num_bounds)
                pace = Pace(window, self._model, config.limits, config.kv_tokens)
                shares.append(pace.bound(rate).num_good / len(window))
            facts = {"workload": self._name, "strength": strength, "requests_per_s": rate}
            mean = sum(shares) / len(shares)
            spread = {"share": mean, "least_share": min(shares), "most_share": max(shares)}
            rows.append(facts | spread)
        on_progress(num_bounds, num_bounds)
        return pd.DataFrame(rows)

    def _knees(
        self, policies: Sequence[str], target: float, on_progress: OnProgress
    ) -> dict[str, dict[str, object]]:
        contenders = [
            Contender(p, p, self._model, self.workload.scenario.model, self._calm) for p in policies
        ]
        sweep = Sweep(contenders, self._windows, Plan((target,), self.scale.precision), self.store)
        sweep.run(local_pool(self.jobs), on_progress)
        for measured in sweep.measured.values():
            if measured.error is not None:
                raise measured.error
        study = Study(list(sweep.measured.values()), self._windows)
        found = {policy: study.capacity(policy, target) for policy in policies}
        return {
            policy: {
                "workload": self._name,
                "policy": policy,
                "target": target,
                "requests_per_s": capacity.requests_per_s,
            }
            for policy, capacity in found.items()
            if capacity.requests_per_s > 0
        }

    def _arms(self, policy: str) -> Iterator[Arm]:
        for kind in kinds(self.workload.small_caches):
            if self.only is None or kind.name in self.only:
                for variant in kind.variants:
                    for strength in (kind.neutral, *kind.strengths):
                        yield Arm(policy, kind, variant, strength)

    def _points(self, arm: Arm, rate: float) -> list[Point]:
        """Return the points of a policy under a disturbance, one for each window."""
        config = arm.kind.change(self._calm, arm.variant, arm.strength)
        return [
            Point(
                policy=arm.policy,
                model=self._model_digest,
                trace=self._digest(arm.kind, i, arm.strength),
                rate=rate,
                config=replace(config, seed=i),
            )
            for i in range(len(self._windows))
        ]

    def _play(self, points: Sequence[Point], on_progress: OnProgress) -> None:
        """Run all points that the store lacks, each of them once, and store them."""
        wanted = {point.key: point for point in points}
        for key, point in wanted.items():
            kept = self.store.get(point)
            if kept is not None:
                self._outcomes[key] = kept
        left = {key: point for key, point in wanted.items() if key not in self._outcomes}
        bench = Bench.of(self._traces.values(), [self._model])
        names = {"trace": self._name, "model": self.workload.scenario.model}
        pool = local_pool(self.jobs)(partial(give, bench))
        try:
            running: dict[Future[bytes], str] = {
                pool.submit(run_point, point): key for key, point in left.items()
            }
            for num_done, future in enumerate(as_completed(running), 1):
                key = running[future]
                self._outcomes[key] = Outcomes.unpack(future.result())
                self.store.put(left[key], self._outcomes[key], names)
                on_progress(num_done, len(left))
        finally:  # after an interruption, replays that have not begun are dropped
            pool.shutdown(wait=True, cancel_futures=True)

    def _digest(self, kind: Kind, window: int, strength: float) -> str:
        if not kind.shifts_outputs or strength == kind.neutral:
            return self._window_digests[window]
        return self._shifted_digests[kind.name, window, strength]

    @cached_property
    def _traces(self) -> dict[str, Trace]:
        """Return all traces that are played, by digest."""
        shifted = self._shifted.values()
        return {trace_digest(trace): trace for trace in (*self._windows, *shifted)}

    @cached_property
    def _shifted(self) -> dict[tuple[str, int, float], Trace]:
        return {
            (kind.name, i, strength): kind.trace(window, strength)
            for kind in kinds(self.workload.small_caches)
            if kind.shifts_outputs
            for strength in kind.strengths
            for i, window in enumerate(self._windows)
        }

    @cached_property
    def _shifted_digests(self) -> dict[tuple[str, int, float], str]:
        return {place: trace_digest(trace) for place, trace in self._shifted.items()}

    @cached_property
    def _window_digests(self) -> list[str]:
        return [trace_digest(window) for window in self._windows]

    @cached_property
    def _windows(self) -> list[Trace]:
        scale = replace(
            QUICK,
            num_windows=self.scale.num_windows,
            window_requests=self.scale.window_requests,
        )
        return self.workload.scenario.windows(scale)

    @cached_property
    def _model(self) -> FittedModel:
        return self.workload.scenario.device()

    @cached_property
    def _model_digest(self) -> str:
        return model_digest(self._model)

    @cached_property
    def _calm(self) -> SimulationConfig:
        """Return the scenario's replica, without its noise."""
        return replace(self.workload.scenario.config(self._model), disturbances=UNDISTURBED)

    @property
    def _name(self) -> str:
        return self.workload.scenario.name
