"""The judge: one policy against rivals in all scenarios, in rounds, until clear or out of time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from slosched.evaluate.capacity import CapacityError, MakePool
from slosched.evaluate.capacity.pool import give, stop_at_once
from slosched.evaluate.judge.bout import Bout
from slosched.evaluate.judge.knee import find_knees
from slosched.evaluate.judge.play import Stage, Task
from slosched.evaluate.judge.scenarios import (
    MIN_WINDOW_REQUESTS,
    NUM_KNEE_WINDOWS,
    Contender,
    Scenario,
    known_knees,
    scenarios,
)
from slosched.evaluate.judge.sequential import LOOKS
from slosched.evaluate.judge.time_limit import TimeLimit
from slosched.evaluate.judge.work import Player, work
from slosched.workload import Trace

LOADS = (1.0, 2.0)
"""The loads at which policies are compared, as multiples of the knee."""
OnProgress = Callable[[int, int], None]
"""A function that is called with the number of replays done and of those that may be left."""


@dataclass
class Judge:
    """A policy, its rivals, and all that was found so far."""

    policy: Contender
    scenarios: Mapping[str, Scenario]
    rivals: Mapping[str, Contender] | None = None
    """The rivals in every scenario; None for the scenario's finalists."""
    trace: Trace | None = None
    """The trace from which windows are cut, in place of made-up requests."""
    knees: dict[str, float] = field(default_factory=dict)
    """The knee of each scenario in requests/s, once it is found."""
    bouts: list[Bout] = field(default_factory=list)
    is_out_of_time: bool = False

    def __post_init__(self) -> None:
        for name, scenario in self.scenarios.items():
            found = scenario.num_windows(self.trace)
            if found < LOOKS[0].num_windows:
                raise CapacityError(
                    f"the trace is too short to judge on: {name} needs {LOOKS[0].num_windows} "
                    f"windows of at least {MIN_WINDOW_REQUESTS} requests, and {NUM_KNEE_WINDOWS} "
                    "for the knee"
                )
        if self.trace is not None:
            self.trace.own_rate()
            for scenario in self.scenarios.values():
                scenario.check_windows(self.trace)

    def run(self, make_pool: MakePool, limit: TimeLimit, on_progress: OnProgress) -> None:
        """Play until every answer is clear, all windows are played, or the time is over.

        Looks are taken in rounds: the first look of all scenarios comes before any second one.
        Raises the error of a policy that fails, and StuckPolicyError for one that does not return
        from a call.
        """
        with make_pool(partial(give, Stage(dict(self.scenarios), self.trace, limit))) as pool:
            try:
                self._find_knees(pool, limit)
                self._play(pool, limit, on_progress)
            except BaseException:  # Ctrl-C, too: a worker may be in a call that never ends
                stop_at_once(pool)
                raise

    def _find_knees(self, pool: Executor, limit: TimeLimit) -> None:
        """Find all knees, those of the first scenarios first, and make the bouts of each."""
        self.knees |= self._known_knees()
        wanted = {name: one for name, one in self.scenarios.items() if name not in self.knees}
        self.knees |= find_knees(wanted, self.trace, pool, limit)
        self.is_out_of_time = len(self.knees) < len(self.scenarios)
        found = [name for name in self.scenarios if name in self.knees]
        self.bouts = [self._bout(name, load) for name in found for load in LOADS]

    def _known_knees(self) -> dict[str, float]:
        """Return the knees of the scenarios that are played as they are."""
        if self.trace is not None:
            return {}
        known, every = known_knees(), scenarios()
        as_they_are = [name for name, one in self.scenarios.items() if every.get(name) == one]
        return {name: known[name] for name in as_they_are}

    def _bout(self, name: str, load: float) -> Bout:
        scenario = self.scenarios[name]
        rivals = scenario.finalists if self.rivals is None else self.rivals
        windows = scenario.num_windows(self.trace)
        return Bout(name, load, load * self.knees[name], self.policy, rivals, windows)

    def _play(self, pool: Executor, limit: TimeLimit, on_progress: OnProgress) -> None:
        """Take looks in rounds: nobody takes the next look before all have taken this one."""

        def more(running: Container[Task]) -> Iterator[tuple[Player, Task]]:
            playing = [bout for bout in self.bouts if bout.look is not None]
            first = min((bout.num_looks for bout in playing), default=0)
            for bout in playing:
                if bout.num_looks == first:
                    yield from ((bout, task) for task in bout.tasks() if task not in running)

        work(pool, more, limit, lambda: on_progress(*self._progress()))
        self.is_out_of_time |= bool(self._progress()[1])

    def _progress(self) -> tuple[int, int]:
        done = sum(len(bout.shares) for bout in self.bouts)
        return done, sum(bout.num_left() for bout in self.bouts)
