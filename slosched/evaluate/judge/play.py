"""Replays of the judge, as a worker process runs them: a window under a policy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from slosched.evaluate.capacity import Outcomes
from slosched.evaluate.capacity.point import as_in
from slosched.evaluate.capacity.pool import given
from slosched.evaluate.judge.scenarios import Contender, Scenario
from slosched.evaluate.judge.time_limit import NO_LIMIT, TimeLimit
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import simulate
from slosched.workload import Trace

WARM_UP_SHARE = 0.4
"""The first part of each window, whose requests do not count; the same for every policy, also in a
closed loop, where requests arrive in another order under each."""


@dataclass(frozen=True)
class Stage:
    """What all replays of a verdict share, given to each worker once."""

    scenarios: dict[str, Scenario]
    trace: Trace | None = None
    """The trace from which windows are cut, in place of made-up requests."""
    limit: TimeLimit = NO_LIMIT
    """Ends the replay that a worker is in."""


@dataclass(frozen=True)
class Task:
    """One replay: a window of a scenario at a rate, under a contender."""

    scenario: str
    rate: float
    window: int
    contender: Contender


def share_good(task: Task) -> float:
    """Return the share of good requests of a window after its warm-up.

    Raises OutOfTimeError or StuckPolicyError when the time of the verdict is over.
    """
    with given(Stage).limit.ending(task.contender.policy):
        return _share_good(task)


def _share_good(task: Task) -> float:
    scenario = given(Stage).scenarios[task.scenario]
    window = _window(task.scenario, task.window, task.rate)
    config = scenario.config(task.contender, task.window)
    requests = simulate(window, make_policy(task.contender.policy), scenario.device(), config)
    good = Outcomes.of(as_in(window, requests), config.limits.deadline_rule).good
    return float(good[int(WARM_UP_SHARE * len(good)) :].mean())


@lru_cache(maxsize=16)
def _window(name: str, number: int, rate: float) -> Trace:
    return given(Stage).scenarios[name].window(number, rate, given(Stage).trace)
