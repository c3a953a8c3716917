"""The arena's scenarios and their finalists, with requests that need no trace file.

`arena.json` is made by `python -m experiments.arena finalists` from the arena's committed results:
of each class the contender that served most, with the setting that was best for it in tuning.
`knees.json` has the knees of these scenarios, which take minutes to find; it is made by
`python -m experiments.arena knees`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from slosched.core import DeadlineRule, Limits
from slosched.evaluate.capacity import check_rate_of, window
from slosched.evaluate.judge.promises import PROMISES
from slosched.evaluate.judge.sequential import LOOKS
from slosched.perfmodel import FittedModel, load_model
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace, synthesize
from slosched.workload.lengths import Lognormal

FILE = Path(__file__).with_name("arena.json")
KNEES_FILE = Path(__file__).with_name("knees.json")
NOISE = 0.05
WINDOW_REQUESTS = 800
"""Requests of a window; a scenario with long requests has fewer."""
MIN_WINDOW_REQUESTS = 100
NUM_KNEE_WINDOWS = 3
"""The windows on which the knee is found."""
MIN_WINDOWS = 15
"""The windows into which a trace is cut at least, those for the knee included."""
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Contender:
    """A policy's spec and the limits that are tuned with it."""

    policy: str
    limits: tuple[tuple[str, Any], ...] = ()
    """Fields of `Limits` that differ from the default, with their values."""

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.limits)
        return f"{self.policy} ({told})" if told else self.policy


@dataclass(frozen=True)
class Scenario:
    """One device, one kind of requests, one promise and one deadline rule."""

    name: str
    model: str
    requests: Mapping[str, Any] = field(hash=False)
    """The kind of trace to synthesize, with its arrivals and lengths."""
    promise: str
    rule: DeadlineRule
    size_factor: float
    finalists: Mapping[str, Contender] = field(hash=False)
    """The best of each class by the name of the class."""

    def device(self) -> FittedModel:
        return _device(self.model)

    def config(self, contender: Contender, seed: int) -> SimulationConfig:
        """Return the replica: 5 % noise, a model corrected online, the KV cache of the device."""
        return SimulationConfig(
            limits=replace(Limits(deadline_rule=self.rule), **dict(contender.limits)),
            num_blocks=int(self.device().provenance["kv_capacity_tokens"]) // _BLOCK_SIZE,
            block_size=_BLOCK_SIZE,
            disturbances=Disturbances(noise=NOISE),
            online=True,
            seed=seed,
        )

    def window(self, number: int, rate: float, trace: Trace | None = None) -> Trace:
        """Return a window's requests at a rate, made up or cut from `trace`, with their SLOs."""
        size = self._size(trace)
        if trace is None:
            part = _made_up(self.requests, size, rate, number)
        else:
            part = window(trace, size, number)
        if self.requests.get("poisson"):
            part = part.with_poisson_arrivals(seed=number)
        return part.scaled_to(rate).with_slo(PROMISES[self.promise](self.device(), number))

    def num_windows(self, trace: Trace | None) -> float:
        """Return how many windows there are to judge on; made-up ones have no end.

        Windows of a trace share no request, and its last ones are left for the search of the knee.
        """
        if trace is None:
            return math.inf
        return len(trace) // self._size(trace) - NUM_KNEE_WINDOWS

    def check_windows(self, trace: Trace) -> None:
        """Raise TraceError for a window of the trace that may be played and has no rate."""
        found = int(self.num_windows(trace))
        judged = max((n.num_windows for n in LOOKS if n.num_windows <= found), default=0)
        for number in (*range(judged), *range(found, found + NUM_KNEE_WINDOWS)):
            part = window(trace, self._size(trace), number)
            check_rate_of(part, f"{self.name} plays it at other rates: name another trace")

    def _size(self, trace: Trace | None) -> int:
        """Return the number of requests in a window, which a short trace may not have."""
        size = round(self.size_factor * WINDOW_REQUESTS)
        if trace is None:
            return size
        return max(MIN_WINDOW_REQUESTS, min(size, len(trace) // MIN_WINDOWS))


def scenarios() -> dict[str, Scenario]:
    """Return the scenarios by name, the most informative ones first."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: _scenario(name, fields) for name, fields in found.items()}


def known_knees() -> dict[str, float]:
    """Return the knees of the scenarios as they are, with made-up requests, in requests/s."""
    found: dict[str, float] = json.loads(KNEES_FILE.read_text(encoding="utf-8"))
    return found


def _scenario(name: str, fields: Mapping[str, Any]) -> Scenario:
    finalists = {
        group: Contender(one["policy"], tuple(one["limits"].items()))
        for group, one in fields["finalists"].items()
    }
    rule = DeadlineRule(fields["rule"])
    return Scenario(**{**fields, "name": name, "rule": rule, "finalists": finalists})


def _made_up(requests: Mapping[str, Any], size: int, rate: float, seed: int) -> Trace:
    names = [name for name in ("prompt", "output") if name in requests]
    lengths: dict[str, Any] = {name: Lognormal(*requests[name]) for name in names}
    cv = requests.get("arrivals_cv")
    return synthesize(requests["kind"], num_requests=size, rate=rate, seed=seed, cv=cv, **lengths)


_device = cache(load_model)
