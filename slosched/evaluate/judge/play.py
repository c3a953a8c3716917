"""Replays of the judge, as a worker process runs them: a window under a policy, and the knee."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from slosched.evaluate.capacity import Outcomes
from slosched.evaluate.capacity.pool import given
from slosched.evaluate.capacity.rates import Lattice, Search
from slosched.evaluate.capacity.sweep import busy_rate_of_one
from slosched.evaluate.judge.scenarios import NUM_KNEE_WINDOWS, Contender, Scenario
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import simulate
from slosched.workload import Trace

KNEE_TARGET = 0.9
WARM_UP_SHARE = 0.4
"""The first part of each window, whose requests do not count; the same for every policy."""
_KNEE_PRECISION = 0.05
_FIRST_KNEE_WINDOW = 1 << 20
"""The number of the first made-up window on which the knee is found; nobody is judged on it."""
_LOWEST, _HIGHEST = 1 / 64, 4.0
"""The range of the search for the knee, as multiples of the rate that keeps the device busy."""
_FIRST = 0.5


@dataclass(frozen=True)
class Stage:
    """What all replays of a verdict share, given to each worker once."""

    scenarios: dict[str, Scenario]
    trace: Trace | None = None
    """The trace from which windows are cut, in place of made-up requests."""


@dataclass(frozen=True)
class Task:
    """One replay: a window of a scenario at a rate, under a contender."""

    scenario: str
    rate: float
    window: int
    contender: Contender


def share_good(task: Task) -> float:
    """Return the share of good requests of a window after its warm-up."""
    scenario = given(Stage).scenarios[task.scenario]
    return _share_good(scenario, _window(task.scenario, task.window, task.rate), task)


def knee_of(name: str, plain: Contender) -> float:
    """Return the rate up to which the contender keeps 90 % of the promises of some windows.

    It is the lowest rate that is tried if it keeps them at no rate.
    """
    scenario, whole = given(Stage).scenarios[name], given(Stage).trace
    first = _FIRST_KNEE_WINDOW if whole is None else int(scenario.num_windows(whole))
    windows = {n: scenario.window(n, 1.0, whole) for n in range(first, first + NUM_KNEE_WINDOWS)}
    busy = busy_rate_of_one(scenario.device(), scenario.config(plain, 0), windows[first])
    lattice = Lattice.between(_LOWEST * busy, _HIGHEST * busy, _KNEE_PRECISION)
    search = Search(lattice, KNEE_TARGET, lattice.nearest(_FIRST * busy), margin=0)
    known: dict[int, float] = {}
    while places := search.next_places(known):
        for k in places:
            rate = lattice.rate(k)
            known[k] = fmean(
                _share_good(scenario, window.scaled_to(rate), Task(name, rate, number, plain))
                for number, window in windows.items()
            )
    reached, _ = search.bracket(known)
    return lattice.rate(lattice.lowest if reached is None else reached)


def _share_good(scenario: Scenario, window: Trace, task: Task) -> float:
    config = scenario.config(task.contender, task.window)
    requests = simulate(window, make_policy(task.contender.policy), scenario.device(), config)
    good = Outcomes.of(requests, config.limits.deadline_rule).good
    return float(good[int(WARM_UP_SHARE * len(good)) :].mean())


@lru_cache(maxsize=16)
def _window(name: str, number: int, rate: float) -> Trace:
    return given(Stage).scenarios[name].window(number, rate, given(Stage).trace)
