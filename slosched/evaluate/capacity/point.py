"""One simulated replay as a value: what it depends on, its name, and how it is run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from slosched.core import SloschedError
from slosched.evaluate.capacity.outcomes import Outcomes
from slosched.perfmodel import FittedModel
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload.trace import Trace

POINT_FORMAT = 1
"""Part of every key: raised when what a point means changes."""


class CapacityError(SloschedError):
    """A capacity cannot be measured."""


@dataclass(frozen=True)
class Point:
    """All that one replay depends on; the trace and the model by their digests."""

    policy: str
    """As `make_policy` reads it."""
    model: str
    trace: str
    rate: float
    """Offered requests/s, by time compression."""
    config: SimulationConfig

    @property
    def key(self) -> str:
        """The same on any machine, in any process; an option left at its default says nothing."""
        return digest(
            {
                "format": POINT_FORMAT,
                "policy": repr(make_policy(self.policy)),
                "model": self.model,
                "trace": self.trace,
                "rate": self.rate,
                "config": asdict(self.config),
            }
        )


@dataclass(frozen=True)
class Bench:
    """The traces and models of a sweep by digest: what is given to each worker once."""

    traces: Mapping[str, Trace]
    models: Mapping[str, FittedModel]

    @classmethod
    def of(cls, traces: Iterable[Trace], models: Iterable[FittedModel]) -> Bench:
        return cls(
            {trace_digest(trace): trace for trace in traces},
            {model_digest(model): model for model in models},
        )

    def run(self, point: Point) -> Outcomes:
        """Simulate to the end of the last request."""
        requests = simulate(
            self.traces[point.trace].scaled_to(point.rate),
            make_policy(point.policy),
            self.models[point.model],
            point.config,
        )
        return Outcomes.of(requests, point.config.limits.deadline_rule)


def digest(document: object) -> str:
    """Of what JSON can say, whatever the order of its keys."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def trace_digest(trace: Trace) -> str:
    """Of the requests; not of the trace's name or of where it comes from."""
    summed = hashlib.sha256(repr(trace.requests).encode())
    marks = [(r.priority, r.lora_id) for r in trace.requests]
    if set(marks) != {(0, None)}:  # traces that have none keep the digest that they always had
        summed.update(repr(marks).encode())
    return summed.hexdigest()


def model_digest(model: FittedModel) -> str:
    """Of all that predictions depend on."""
    return digest([model.form, model.parameters(), model.held_out_error.get("under_p99", 0.0)])
