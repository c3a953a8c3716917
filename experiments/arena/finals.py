"""The finals: capacities, goodput under overload, attainment by length, and bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from experiments.arena.contenders import Class
from experiments.arena.heats import Settled
from experiments.arena.ring import Ring, undisturbed
from experiments.arena.scenarios import LOADS
from slosched.evaluate.bounds import bounds_of
from slosched.evaluate.capacity import (
    TARGETS,
    CapacityError,
    Contender,
    Plan,
    Ratio,
    Study,
    Sweep,
)
from slosched.metrics.fairness import decile_of
from slosched.perfmodel import FittedModel
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace

DECILE_LOADS = (1.0, 2.0)
KNEE_TARGET = TARGETS[0]
FINE = 1e-4
"""The precision of a lattice so fine that it has a place next to any rate.

An overload is a multiple of the knee, so its rate is not chosen from a coarser lattice."""


@dataclass
class Finals:
    """All measurements of a scenario's finalists, as tables with one fact a row."""

    ring: Ring
    tuned: Sequence[Settled]

    def tables(self) -> dict[str, pd.DataFrame]:
        made = {
            "capacity": pd.DataFrame(self._capacities()),
            "overload": pd.DataFrame(self._overload()),
            "ratios": pd.DataFrame([*self._capacity_ratios(), *self._goodput_ratios()]),
            "deciles": pd.DataFrame(self._deciles()),
            "bounds": pd.DataFrame(self._bounds()),
        }
        for table in made.values():
            table.insert(0, "scenario", self.ring.scenario.name)
        return made

    @cached_property
    def knee(self) -> tuple[str, float]:
        """Return the best plain policy and its capacity at 90 %; of the next class if none has one.

        Raises CapacityError if no policy of any class reaches 90 %.
        """
        for group in Class:
            found = {name: self._capacity(name, KNEE_TARGET) for name in self._of(group)}
            best = max(found, key=lambda name: found[name], default=None)
            if best is not None and found[best]:
                return best, found[best]
        raise CapacityError(f"{self.ring.scenario.name}: no policy reaches {KNEE_TARGET:.0%}")

    @cached_property
    def _contenders(self) -> dict[str, Settled]:
        return {one.entry.name: one for one in self.tuned}

    def _of(self, group: Class) -> list[str]:
        """Return the finalists of a class that could be measured."""
        names = self._study.contenders
        return [name for name in names if self._contenders[name].entry.group is group]

    def _group(self, name: str) -> str:
        return self._contenders[name].entry.group.value

    @cached_property
    def _study(self) -> Study:
        plan = Plan(TARGETS, self.ring.scale.precision)
        return self._judged(self._play(plan, self.ring.windows), self.ring.windows)

    @cached_property
    def _at_loads(self) -> dict[float, Sweep]:
        return {
            load: self._play(
                Plan(TARGETS, FINE, at_rate=load * self.knee[1]), self.ring.overload_windows
            )
            for load in LOADS
        }

    @cached_property
    def _loaded(self) -> dict[float, Study]:
        windows = self.ring.overload_windows
        return {load: self._judged(sweep, windows) for load, sweep in self._at_loads.items()}

    def _play(self, plan: Plan, windows: Sequence[Trace]) -> Sweep:
        contenders = [one.contender(self.ring) for one in self.tuned]
        return self.ring.sweep(contenders, windows, plan)

    def _judged(self, sweep: Sweep, windows: Sequence[Trace]) -> Study:
        return Study(list(sweep.measured.values()), windows)

    def _capacity(self, name: str, target: float) -> float:
        return self._study.capacity(name, target).requests_per_s

    def _capacities(self) -> Iterator[dict[str, object]]:
        for target in TARGETS:
            for name in self._study.contenders:
                found = self._study.capacity(name, target)
                yield {
                    "contender": name,
                    "class": self._group(name),
                    "target": target,
                    "requests_per_s": found.requests_per_s,
                    "low": found.interval.low,
                    "high": found.interval.high,
                    "best_attainment": found.best_attainment,
                    "flags": ", ".join(sorted(found.flags)),
                }

    def _overload(self) -> Iterator[dict[str, object]]:
        for load, study in self._loaded.items():
            for row in study.frame().to_dict("records"):
                yield {
                    "contender": row["policy"],
                    "class": self._group(str(row["policy"])),
                    "load": load,
                    "rate": row["rate"],
                    "attainment": row["attainment"],
                    "attainment_low": row["attainment_low"],
                    "attainment_high": row["attainment_high"],
                    "good_requests_per_s": row["good_requests_per_s"],
                    "short": row["short"],
                }

    def _capacity_ratios(self) -> Iterator[dict[str, object]]:
        for target in TARGETS:
            scores = {name: self._capacity(name, target) for name in self._study.contenders}
            for ours, best in self._pairs(scores):
                ratio = self._study.ratio(ours, best, target)
                yield self._ratio_row(f"capacity {target:.0%}", ours, best, ratio)

    def _goodput_ratios(self) -> Iterator[dict[str, object]]:
        for load, study in self._loaded.items():
            table = study.frame()
            scores = dict(zip(table["policy"], table["attainment"], strict=True))
            (rate,) = set(table["rate"])
            for ours, best in self._pairs(scores):
                ratio = study.goodput_ratio(ours, best, rate)
                yield self._ratio_row(f"goodput {load:g}x", ours, best, ratio)

    def _pairs(self, scores: dict[str, float]) -> Iterator[tuple[str, str]]:
        """Yield pairs of each of our policies with the best of each other class."""
        for ours in self._of(Class.OURS):
            for group in Class:
                others = [name for name in self._of(group) if name in scores]
                if group is not Class.OURS and others and ours in scores:
                    yield ours, max(others, key=lambda name: scores[name])

    def _ratio_row(self, metric: str, ours: str, best: str, ratio: Ratio) -> dict[str, object]:
        return {
            "metric": metric,
            "ours": ours,
            "class": self._group(best),
            "best": best,
            "ratio": ratio.value,
            "low": ratio.interval.low,
            "high": ratio.interval.high,
        }

    def _deciles(self) -> Iterator[dict[str, object]]:
        """Yield good requests by tenths of the prompt lengths, over all counted requests."""
        windows = self.ring.overload_windows
        lengths = np.concatenate([window.prompt_tokens for window in windows])
        decile = decile_of(lengths)
        for load in DECILE_LOADS:
            for name, measured in self._at_loads[load].measured.items():
                for place in measured.complete:
                    found = [measured.outcomes[place][i] for i in range(len(windows))]
                    counted = np.concatenate([o.counted for o in found])
                    good = np.concatenate([o.good for o in found])
                    for i in range(int(decile.max()) + 1):
                        inside = counted & (decile == i)
                        yield {
                            "contender": name,
                            "class": self._group(name),
                            "load": load,
                            "decile": i + 1,
                            "min_prompt_tokens": int(lengths[decile == i].min()),
                            "max_prompt_tokens": int(lengths[decile == i].max()),
                            "num_offered": int(inside.sum()),
                            "num_good": int((inside & good).sum()),
                        }

    def _bounds(self) -> Iterator[dict[str, object]]:
        """Yield the good requests of the best, and the most that are possible, without noise.

        The bounds hold only on a device without noise, and they count all requests of a trace, with
        no warm-up left out.
        """
        ring = self.ring
        config = undisturbed(ring.config)
        contenders = [_undisturbed(self._contenders[name], ring) for name in self._best_at(2.0)]
        rates = [load * self.knee[1] for load in LOADS]
        # The bounds take longest, so they begin first.
        futures = [
            ring.submit(_most_good, window, rates, ring.model, config, ring.scenario.hindsight)
            for window in ring.bound_windows
        ]
        offered = sum(len(window) for window in ring.bound_windows)
        good = [self._undisturbed_good(contenders, rate) for rate in rates]
        by_window = [future.result() for future in futures]
        for i, load in enumerate(LOADS):
            shared = {"load": load, "rate": rates[i], "num_offered": offered}
            for name, num_good in good[i].items():
                yield {**shared, "who": name, "class": self._group(name), "num_good": num_good}
            for name in by_window[0][i]:
                most = sum(found[i][name] for found in by_window)
                yield {**shared, "who": name, "class": "bound", "num_good": most}

    def _best_at(self, load: float) -> list[str]:
        """Return the best of each class at a load, and all of ours."""
        table = self._loaded[load].frame()
        share = dict(zip(table["policy"], table["attainment"], strict=True))
        best = self._of(Class.OURS)
        for group in (Class.PLAIN, Class.DROPPING, Class.PUBLISHED):
            names = [name for name in self._of(group) if name in share]
            best += sorted(names, key=lambda name: -share[name])[:1]
        return best

    def _undisturbed_good(self, contenders: Sequence[Contender], rate: float) -> dict[str, int]:
        """Return good requests by contender, over all requests of the bounds' windows."""
        plan = Plan(TARGETS, FINE, at_rate=rate)
        measured = self.ring.sweep(contenders, self.ring.bound_windows, plan).measured
        return {
            name: sum(int(o.good.sum()) for o in m.outcomes[m.complete[0]].values())
            for name, m in measured.items()
            if m.complete
        }


def _undisturbed(one: Settled, ring: Ring) -> Contender:
    contender = one.contender(ring)
    return replace(contender, config=undisturbed(contender.config))


def _most_good(
    window: Trace,
    rates: Sequence[float],
    model: FittedModel,
    config: SimulationConfig,
    hindsight: bool,
) -> list[dict[str, int]]:
    """Return by rate and bound the number of a window's requests that could be served well."""
    found = [bounds_of(window.scaled_to(r), model, config, hindsight=hindsight) for r in rates]
    return [{bound.name: bound.num_good for bound in bounds.each} for bounds in found]
