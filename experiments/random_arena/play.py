"""One cell, from tuning to ratios, in one process.

All contenders may try the same few settings on windows that do not judge.  The best of each class
go on to windows that do.  Requests that no idle device could serve in time count nowhere: they are
there to be in the way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from experiments.arena.contenders import Class, Entry
from experiments.command import provenance
from experiments.random_arena.cells import (
    MOST_WINDOW_REQUESTS,
    WINDOW_REQUESTS,
    Cell,
    keepable,
    num_for,
)
from experiments.random_arena.contenders import REFERENCES, RIVALS
from experiments.random_arena.workloads import one_after_another
from slosched.evaluate.capacity import (
    TARGETS,
    Contender,
    Plan,
    Ratio,
    Study,
    Sweep,
    busy_rate,
    local_pool,
)
from slosched.evaluate.capacity.outcomes import BoolArray
from slosched.evaluate.tuning import Objective, Tuned, Tuner
from slosched.perfmodel import FittedModel
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace

Row = dict[str, Any]
REFERENCE_TARGET = 0.95
OVERLOAD = 2.0
"""The load at which all are compared, as a multiple of the best capacity at the first target."""
LOWEST, HIGHEST = 1 / 6, 16.0
"""The rates between which capacities are sought, as multiples of the rate for tuning."""
_HIGHEST_OF_BUSY, _RATE_RATIO, _NUM_RATES = 1.5, 0.75, 14
"""The rates that are tried for tuning: the first, as a multiple of the rate that keeps the device
busy, the ratio of the next one to each, and their number."""
_PRECISION = 0.08
_FINE = 1e-4
"""The precision of a lattice so fine that it has a place next to any rate."""
_IN_LINE = local_pool(1)


@dataclass(frozen=True)
class Effort:
    """How much of a cell is played."""

    num_trials: int = 6
    """The most settings that are tried of each contender."""
    num_finalists: int = 2
    """Contenders of each class that are judged, the best in tuning; ours always are."""
    window_requests: int = WINDOW_REQUESTS
    """The least requests of a window, fewer where they are long."""
    most_window_requests: int = MOST_WINDOW_REQUESTS
    """The most requests of a window, fewer where they are long, too."""


@dataclass(frozen=True)
class Finalist:
    """A contender with its best setting."""

    group: Class
    tuned: Tuned
    contender: Contender


@dataclass(frozen=True)
class Stage:
    """Windows of a cell, and which of their requests count."""

    windows: Sequence[Trace]
    judged: Sequence[BoolArray]

    @classmethod
    def of(cls, windows: Sequence[Trace], device: FittedModel, config: SimulationConfig) -> Stage:
        return cls(windows, [keepable(window, device, config) for window in windows])

    def in_lasting_overload(self) -> Stage:
        """Return as many windows, each of the requests of all, of which the last do not count.

        Each begins with another of the windows.  The requests of the one that comes last are there
        for those before them: a policy that leaves the hard ones to the end would else serve them
        when nobody comes any more.
        """
        windows, judged = [], []
        for first in range(len(self.windows)):
            order = [*range(first, len(self.windows)), *range(first)]
            *counted, last = (self.judged[i] for i in order)
            windows.append(one_after_another([self.windows[i] for i in order]))
            judged.append(np.concatenate([*counted, np.zeros_like(last)]))
        return Stage(windows, judged)

    @property
    def share_judged(self) -> float:
        return sum(int(j.sum()) for j in self.judged) / sum(len(w) for w in self.windows)

    @property
    def is_empty(self) -> bool:
        """Tell whether no request of some window counts."""
        return not all(judged.any() for judged in self.judged)

    def played(self, contenders: Sequence[Contender], plan: Plan) -> Study:
        """Play all contenders as planned.  Raises the error of a contender that failed."""
        sweep = Sweep(contenders, self.windows, plan, judged=self.judged)
        sweep.run(_IN_LINE)
        for measured in sweep.measured.values():
            if measured.error is not None:
                raise measured.error
        return Study(list(sweep.measured.values()), self.windows, judged=self.judged)


def prepare_nothing() -> None:
    """Make a process of a pool ready for matches, for which it needs nothing.

    It is here and not beside the pool, since a process cannot import it from a `__main__`.
    """


@dataclass
class Match:
    """A cell and its contenders; what it holds is played when it is asked for."""

    cell: Cell
    entries: Sequence[Entry]
    effort: Effort = Effort()

    def row(self) -> Row:
        """Return all that was found, as JSON can express it; `void` says why nothing was."""
        begin_s = time.process_time()
        found = {"void": self._why_void} if self._why_void else self._found()
        return {
            "name": self.cell.name,
            "cell": asdict(self.cell),
            "source": str(self.cell.source()),
            "contenders": " ".join(entry.name for entry in self.entries),
            **found,
            "cpu_s": round(time.process_time() - begin_s, 1),
            **provenance("random_arena"),
        }

    @cached_property
    def _why_void(self) -> str:
        if self._tuning.is_empty or self._final.is_empty:
            return "an idle device keeps no promise of some window"
        if not self.tuning_rate:
            return f"no reference serves {REFERENCE_TARGET:.0%} in time at any rate"
        if not self._top_rate:
            return f"nobody serves {TARGETS[0]:.0%} in time at any rate"
        return ""

    def _found(self) -> Row:
        return {
            "share_judged": self._final.share_judged,
            "window_requests": self.window_requests,
            "overload_requests": len(self._lasting.windows[0]),
            "tuning_rate": self.tuning_rate,
            "settings": {one.contender.name: one.tuned.policy for one in self._finalists},
            "capacity": list(self._capacities()),
            "overload": self._overload.frame().to_dict("records"),
            "ratios": [*self._capacity_ratios(), *self._overload_ratios()],
        }

    @cached_property
    def _device(self) -> FittedModel:
        return self.cell.device()

    @cached_property
    def _config(self) -> SimulationConfig:
        return self.cell.config(self._device)

    @cached_property
    def _usual(self) -> Stage:
        """Return the windows for tuning if they have the usual number of requests."""
        return self._tuning_of(self.cell.usual(self.effort.window_requests))

    @cached_property
    def _usual_rate(self) -> float:
        return self._highest_rate(self._usual)

    @cached_property
    def window_requests(self) -> int:
        """Return the requests of a window: the usual number, or as many as make it long enough."""
        usual = self.cell.usual(self.effort.window_requests)
        needed = num_for(self._usual.windows[0], self._usual_rate)
        return max(usual, min(needed, self.cell.usual(self.effort.most_window_requests)))

    @property
    def _is_usual(self) -> bool:
        return self.window_requests == self.cell.usual(self.effort.window_requests)

    @cached_property
    def _tuning(self) -> Stage:
        return self._usual if self._is_usual else self._tuning_of(self.window_requests)

    def _tuning_of(self, size: int) -> Stage:
        windows = self.cell.tuning_windows(self._device, size)
        return Stage.of(windows, self._device, self._config)

    @cached_property
    def _final(self) -> Stage:
        windows = self.cell.windows(self._device, self.window_requests)
        return Stage.of(windows, self._device, self._config)

    @cached_property
    def _lasting(self) -> Stage:
        return self._final.in_lasting_overload()

    @cached_property
    def tuning_rate(self) -> float:
        """Return the rate at which contenders are tuned, 0 if there is none."""
        return self._usual_rate if self._is_usual else self._highest_rate(self._tuning)

    def _highest_rate(self, stage: Stage) -> float:
        """Return the highest rate tried at which a reference, at its defaults, serves 95 % in time.

        It is 0 if there is none.  Rates are tried from the highest down, since replays at low rates
        take longest.
        """
        if stage.is_empty:
            return 0.0
        references = [self._contender(e) for e in self.entries if e.name in REFERENCES]
        rate = _HIGHEST_OF_BUSY * busy_rate(references[0], stage.windows[0])
        for tried in (rate * _RATE_RATIO**i for i in range(_NUM_RATES)):
            plan = Plan((REFERENCE_TARGET,), _FINE, at_rate=tried)
            shares = stage.played(references, plan).frame()["attainment"]
            if shares.max() >= REFERENCE_TARGET:
                return tried
        return 0.0

    @cached_property
    def _finalists(self) -> list[Finalist]:
        """Return ours and the best of each other class, those of a class in order of their score.

        Good requests/s at one rate are the score, so those that cannot be good do not matter here.
        """
        tuned = [(entry, self._tuned(entry)) for entry in self.entries]
        tuned.sort(key=lambda one: -one[1].trials[0].score)
        going = [one for one in tuned if one[0].group is Class.OURS]
        for group in RIVALS:
            mine = [one for one in tuned if one[0].group is group]
            going += mine[: self.effort.num_finalists]
        return [self._finalist(entry, found) for entry, found in going]

    def _tuned(self, entry: Entry) -> Tuned:
        tuner = Tuner(
            self._contender(entry),
            entry.values,
            self._tuning.windows,
            Objective(rate=self.tuning_rate),
            max_trials=self.effort.num_trials,
        )
        return tuner.run(_IN_LINE)

    def _finalist(self, entry: Entry, tuned: Tuned) -> Finalist:
        config = tuned.on(self._config)
        contender = Contender(entry.name, tuned.policy, self._device, self.cell.model, config)
        return Finalist(entry.group, tuned, contender)

    def _contender(self, entry: Entry) -> Contender:
        return Contender(entry.name, entry.policy, self._device, self.cell.model, self._config)

    @cached_property
    def _study(self) -> Study:
        rate = self.tuning_rate
        plan = Plan(TARGETS, _PRECISION, min_rate=LOWEST * rate, max_rate=HIGHEST * rate)
        return self._final.played(self._playing, plan)

    @cached_property
    def _overload(self) -> Study:
        plan = Plan(TARGETS, _FINE, at_rate=OVERLOAD * self._top_rate)
        return self._lasting.played(self._playing, plan)

    @property
    def _playing(self) -> list[Contender]:
        return [one.contender for one in self._finalists]

    @cached_property
    def _top_rate(self) -> float:
        """Return the best capacity at the first target."""
        study = self._study
        return max(study.capacity(n, TARGETS[0]).requests_per_s for n in study.contenders)

    def _capacities(self) -> Iterator[Row]:
        for target in TARGETS:
            for one in self._finalists:
                found = self._study.capacity(one.contender.name, target)
                yield {
                    "contender": one.contender.name,
                    "class": one.group.value,
                    "target": target,
                    "requests_per_s": found.requests_per_s,
                    "best_attainment": found.best_attainment,
                    "flags": sorted(found.flags),
                }

    def _capacity_ratios(self) -> Iterator[Row]:
        for target in TARGETS:
            scores = {
                one.contender.name: self._study.capacity(one.contender.name, target).requests_per_s
                for one in self._finalists
            }
            for ours, group, best in self._pairs(scores):
                ratio = self._study.ratio(ours, best, target)
                yield _ratio_row(f"capacity {target:.0%}", ours, group, best, ratio, scores)

    def _overload_ratios(self) -> Iterator[Row]:
        table = self._overload.frame()
        (rate,) = set(table["rate"])
        scores = dict(zip(table["policy"], table["attainment"], strict=True))
        for ours, group, best in self._pairs(scores):
            ratio = self._overload.goodput_ratio(ours, best, rate)
            yield _ratio_row(f"overload {OVERLOAD:g}x", ours, group, best, ratio, scores)

    def _pairs(self, scores: dict[str, float]) -> Iterator[tuple[str, Class, str]]:
        """Yield each of ours with each rival class and the best of it."""
        for ours in (one.contender.name for one in self._finalists if one.group is Class.OURS):
            for group in RIVALS:
                others = [one.contender.name for one in self._finalists if one.group is group]
                yield ours, group, max(others, key=lambda name: scores[name])


def _ratio_row(
    metric: str, ours: str, group: Class, best: str, ratio: Ratio, scores: dict[str, float]
) -> Row:
    return {
        "metric": metric,
        "ours": ours,
        "class": group.value,
        "best": best,
        "of_ours": scores[ours],
        "of_best": scores[best],
        "ratio": ratio.value,
        "low": ratio.interval.low,
        "high": ratio.interval.high,
    }
