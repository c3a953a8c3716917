"""The knee of a scenario: the rate up to which the best plain policy keeps 90 % of the promises."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from concurrent.futures import Executor
from statistics import fmean

from slosched.evaluate.capacity.rates import Lattice, Search
from slosched.evaluate.capacity.sweep import busy_rate_of_one
from slosched.evaluate.judge.play import Task
from slosched.evaluate.judge.scenarios import NUM_KNEE_WINDOWS, Scenario
from slosched.evaluate.judge.time_limit import TimeLimit
from slosched.evaluate.judge.work import Player, work
from slosched.workload import Trace

_TARGET = 0.9
_PLAIN = "plain"
"""The class of the finalist whose capacity is the knee."""
_PRECISION = 0.05
_FIRST_WINDOW = 1 << 20
"""The number of the first made-up window on which the knee is found; nobody is judged on it."""
_LOWEST, _HIGHEST = 1 / 64, 4.0
"""The range of the search, as multiples of the rate that keeps the device busy."""
_FIRST = 0.5


class KneeSearch:
    """The replays that are needed to find a scenario's knee, and what came of them."""

    def __init__(self, scenario: Scenario, trace: Trace | None) -> None:
        self.scenario, self.plain = scenario, scenario.finalists[_PLAIN]
        first = _FIRST_WINDOW if trace is None else int(scenario.num_windows(trace))
        self._windows = range(first, first + NUM_KNEE_WINDOWS)
        window = scenario.window(first, 1.0, trace)
        busy = busy_rate_of_one(scenario.device(), scenario.config(self.plain, 0), window)
        lattice = Lattice.between(_LOWEST * busy, _HIGHEST * busy, _PRECISION)
        self._search = Search(lattice, _TARGET, lattice.nearest(_FIRST * busy), margin=0)
        self._shares: dict[Task, float] = {}
        self._known: dict[int, float] = {}
        """The mean share of good requests by place in the lattice of rates."""

    def tasks(self) -> Iterator[Task]:
        """Yield the replays that the next rate needs and that were not played; none at the end."""
        for place in self._search.next_places(self._known):
            yield from (task for task in self._tasks_at(place) if task not in self._shares)

    def take(self, task: Task, share: float) -> None:
        """Keep the share of good requests of a replay."""
        self._shares[task] = share
        for place in self._search.next_places(self._known):
            found = [self._shares.get(one) for one in self._tasks_at(place)]
            shares = [one for one in found if one is not None]
            if len(shares) == NUM_KNEE_WINDOWS:
                self._known[place] = fmean(shares)

    @property
    def knee(self) -> float | None:
        """Return the knee in requests/s; None while it is not found.

        It is the lowest rate that is tried if the promises are kept at no rate.
        """
        if self._search.next_places(self._known):
            return None
        reached, _ = self._search.bracket(self._known)
        lattice = self._search.lattice
        return lattice.rate(lattice.lowest if reached is None else reached)

    def _tasks_at(self, place: int) -> list[Task]:
        rate = self._search.lattice.rate(place)
        return [Task(self.scenario.name, rate, number, self.plain) for number in self._windows]


def find_knees(
    wanted: Mapping[str, Scenario], trace: Trace | None, pool: Executor, limit: TimeLimit
) -> dict[str, float]:
    """Return the knees that are found before the time is over, the first scenarios' first.

    The processes of the pool have the scenarios and the trace (`Stage`).
    """
    searches = {name: KneeSearch(one, trace) for name, one in wanted.items()}

    def more(running: Container[Task]) -> Iterator[tuple[Player, Task]]:
        for search in searches.values():
            yield from ((search, task) for task in search.tasks() if task not in running)

    work(pool, more, limit)
    knees = {name: search.knee for name, search in searches.items()}
    return {name: knee for name, knee in knees.items() if knee is not None}
