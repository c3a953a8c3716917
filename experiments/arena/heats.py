"""The heats: every contender is tuned on requests that do not judge it, and the best go on.

All contenders of a class are tuned for good requests/s at one rate near the knee.  It is the rate
at which the class's reference, at its defaults, serves 95 % well.  All may try the same number of
settings.  The best at that rate need not be the best at a lower one, so the best at each go on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import pandas as pd

from experiments.arena.contenders import Class, Entry
from experiments.arena.ring import Ring
from slosched.evaluate.capacity import CapacityError, Contender, Plan, Study
from slosched.evaluate.tuning import Objective, Tuned, Tuner

REFERENCES = {
    Class.PLAIN: "edf",
    Class.DROPPING: "goodput",
    Class.PUBLISHED: "goodput",
    Class.OURS: "goodput",
}
"""The reference of each class, at its defaults.

Plain policies break down at rates at which the other classes do not differ yet, so they are tuned
at a lower rate."""
REFERENCE_TARGET = 0.95
CALM = 0.8
"""The lower of the two rates at which finalists are chosen, as a share of the higher one."""
_PRECISION = 0.05


@dataclass(frozen=True)
class Settled:
    """A contender with its best setting."""

    entry: Entry
    policy: str
    limits: dict[str, int]
    score: float
    """Good requests/s on the tuning windows; below zero if the replays failed."""
    calm_score: float
    """The same score at `CALM` times the rate."""
    rate: float
    num_trials: int

    def contender(self, ring: Ring) -> Contender:
        limits = replace(ring.config.limits, **self.limits)  # type: ignore[arg-type]
        base = ring.contender(self.entry, replace(ring.config, limits=limits))
        return replace(base, policy=self.policy)


def tune_all(ring: Ring, entries: Sequence[Entry]) -> list[Settled]:
    """Tune all entries, and return them in the order given."""
    rates = _rates(ring, {REFERENCES[entry.group] for entry in entries})
    tuned = [_tune(ring, entry, rates[REFERENCES[entry.group]]) for entry in entries]
    return _calmer(ring, tuned)


def tune_beside(ring: Ring, kept: Sequence[Settled], entries: Sequence[Entry]) -> list[Settled]:
    """Tune these entries again, at the rate at which the others of their class were tuned.

    Raises ValueError if no other one of the class is kept.
    """
    rates = {REFERENCES[one.entry.group]: one.rate for one in kept}
    if unknown := [one.name for one in entries if REFERENCES[one.group] not in rates]:
        raise ValueError(
            f"no other contender of the class of {', '.join(unknown)} is tuned: leave out --retune"
        )
    return _calmer(ring, [_tune(ring, one, rates[REFERENCES[one.group]]) for one in entries])


def finalists(ring: Ring, tuned: Sequence[Settled]) -> list[Settled]:
    """Return the contenders that go on: the best of each class and all of ours, if sound."""
    sound = [one for one in tuned if one.score >= 0]
    most = ring.scale.num_finalists
    going = {one.entry.name for one in sound if one.entry.group is Class.OURS}
    for group in Class:
        mine = [one for one in sound if one.entry.group is group]
        for key in (attrgetter("score"), attrgetter("calm_score")):
            going |= {one.entry.name for one in sorted(mine, key=key, reverse=True)[:most]}
    return [one for one in sound if one.entry.name in going]


def frame(scenario: str, tuned: Sequence[Settled]) -> pd.DataFrame:
    """Return a row for each contender, as `settled` reads it."""
    return pd.DataFrame(
        {
            "scenario": scenario,
            "contender": one.entry.name,
            "class": one.entry.group.value,
            "tuned": one.policy,
            "limits": json.dumps(one.limits),
            "rate": one.rate,
            "good_requests_per_s": one.score,
            "calm_good_requests_per_s": one.calm_score,
            "num_trials": one.num_trials,
        }
        for one in tuned
    )


def settled(rows: pd.DataFrame, entries: Sequence[Entry]) -> list[Settled]:
    """Read what an earlier run found.  Raises ValueError if it did not tune an entry."""
    by_name = rows.set_index("contender").to_dict("index")
    if missing := [entry.name for entry in entries if entry.name not in by_name]:
        raise ValueError(
            f"{', '.join(missing)} have not been tuned yet: leave out --keep-tuning, or name them "
            "by --retune"
        )
    found = []
    for entry in entries:
        row = by_name[entry.name]
        found.append(
            Settled(
                entry,
                policy=str(row["tuned"]),
                limits=json.loads(row["limits"]),
                score=float(row["good_requests_per_s"]),
                calm_score=float(row["calm_good_requests_per_s"]),
                rate=float(row["rate"]),
                num_trials=int(row["num_trials"]),
            )
        )
    return found


def _rates(ring: Ring, references: set[str]) -> dict[str, float]:
    """Return for each reference the rate at which it serves 95 % of the tuning requests well.

    Raises CapacityError if no reference does so at any rate.
    """
    model, config = ring.model, ring.config
    contenders = [
        Contender(name, name, model, ring.scenario.model, config) for name in sorted(references)
    ]
    plan = Plan((REFERENCE_TARGET,), _PRECISION)
    sweep = ring.sweep(contenders, ring.tuning_windows, plan)
    study = Study(list(sweep.measured.values()), ring.tuning_windows)
    found = {
        name: study.capacity(name, REFERENCE_TARGET).requests_per_s for name in study.contenders
    }
    most = max(found.values(), default=0.0)
    if not most:
        raise CapacityError(
            f"{ring.scenario.name}: not even {', '.join(sorted(references))} serve "
            f"{REFERENCE_TARGET:.0%} in time at any rate; the promise is too tight for this device"
        )
    # A reference that reaches it at no rate gets half of the other's rate, which is near enough.
    return {name: found.get(name) or most / 2 for name in references}


def _tune(ring: Ring, entry: Entry, rate: float) -> Settled:
    tuner = Tuner(
        ring.contender(entry),
        entry.values,
        ring.tuning_windows,
        Objective(rate=rate),
        precision=ring.scale.precision,
        store=ring.store,
        max_trials=ring.scale.max_trials,
    )
    found: Tuned = tuner.run(ring.make_pool)
    best = found.trials[0]
    score = -math.inf if best.error else best.score
    return Settled(entry, found.policy, found.limits, score, -math.inf, rate, len(found.trials))


def _calmer(ring: Ring, tuned: Sequence[Settled]) -> list[Settled]:
    """Add the scores of the tuned contenders at the lower rate."""
    scores: dict[str, float] = {}
    for rate in {one.rate for one in tuned}:
        objective = Objective(rate=CALM * rate)
        contenders = [one.contender(ring) for one in tuned if one.rate == rate]
        plan = objective.plan(ring.scale.precision)
        sweep = ring.sweep(contenders, ring.tuning_windows, plan)
        scores |= {name: objective.score(measured) for name, measured in sweep.measured.items()}
    return [replace(one, calm_score=scores[one.entry.name]) for one in tuned]
