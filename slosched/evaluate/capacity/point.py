"""One simulated replay as a value: its inputs, its key, and how it is run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from slosched.core import OnInfeasible, Request, SloschedError
from slosched.evaluate.capacity.outcomes import Outcomes
from slosched.fleet.setup import FleetSetup
from slosched.fleet.spec import make_router, make_scaler
from slosched.fleet.split_setup import AnyFleet
from slosched.kv import Eviction
from slosched.perfmodel import FittedModel
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload.trace import Trace

POINT_FORMAT = 1
"""A part of every key, raised when the meaning of a point changes."""
_USUAL_BLOCK_TOKENS = 16
"""Traces whose prefix hashes stand for so many tokens keep the digests of earlier versions, which
did not look at that number."""


class CapacityError(SloschedError):
    """A capacity cannot be measured."""


@dataclass(frozen=True)
class Point:
    """All that one replay depends on, with the trace and the model by their digests."""

    policy: str
    """The policy's spec, as `make_policy` reads it."""
    model: str
    trace: str
    rate: float
    """Offered requests/s, by time compression."""
    config: SimulationConfig
    fleet: AnyFleet | None = None
    """The fleet that is simulated in place of the one replica."""

    @property
    def key(self) -> str:
        """Return a key that is the same on any machine and for any way to write the same policy."""
        document = {
            "format": POINT_FORMAT,
            "policy": repr(make_policy(self.policy)),
            "model": self.model,
            "trace": self.trace,
            "rate": self.rate,
            "config": _config_document(self.config),
        }
        if self.fleet is not None:  # points of one replica keep the keys of earlier versions
            document["fleet"] = _fleet_document(self.fleet)
        return digest(document)


@dataclass(frozen=True)
class Bench:
    """The traces and models of a sweep by digest, which each worker is given once."""

    traces: Mapping[str, Trace]
    models: Mapping[str, FittedModel]

    @classmethod
    def of(cls, traces: Iterable[Trace], models: Iterable[FittedModel]) -> Bench:
        return cls(
            {trace_digest(trace): trace for trace in traces},
            {model_digest(model): model for model in models},
        )

    def run(self, point: Point) -> Outcomes:
        """Simulate to the end of the last request, and return the outcomes."""
        trace = self.traces[point.trace].scaled_to(point.rate)
        policy = make_policy(point.policy)
        if point.fleet is None:
            requests = simulate(trace, policy, self.models[point.model], point.config)
        else:
            requests = point.fleet.simulate(trace, policy, point.config.seed)
        return Outcomes.of(as_in(trace, requests), point.config.limits.deadline_rule)


def as_in(trace: Trace, requests: Sequence[Request]) -> Sequence[Request]:
    """Return replayed requests in the order of their trace; siblings come with the first of them.

    In a closed loop a replay returns them in the order in which they arrived.  That depends on the
    policy, while blocks and marks belong to requests by their place in the trace.
    """
    if not trace.is_closed_loop:
        return requests
    place = {request.request_id: index for index, request in enumerate(trace.requests)}

    def place_of(request: Request) -> int:
        first = request if request.group is None else request.group.members[0]
        return place[first.request_id]

    return sorted(requests, key=place_of)


def digest(document: object) -> str:
    """Return the digest of a document that JSON can express, in any order of its keys."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _config_document(config: SimulationConfig) -> dict[str, object]:
    """Return the settings of a replica; what is not used is left out, as earlier versions did."""
    document = asdict(config)
    for name in ("drafts", "window_tokens"):
        if document[name] is None:
            del document[name]
    if config.eviction is Eviction.LRU:
        del document["eviction"]
    return document


def _fleet_document(fleet: AnyFleet) -> dict[str, object]:
    """Return all that the replay on a fleet depends on, in a form that JSON can express."""
    document: dict[str, object] = {
        "router": repr(make_router(fleet.router)),
        "replicas": [
            [model_digest(model), _config_document(config)] for model, config in fleet.replicas
        ],
        "config": asdict(fleet.config),
    }
    if isinstance(fleet, FleetSetup) and fleet.scaling is not None:
        document["scaler"] = repr(make_scaler(fleet.scaling.scaler))
        document["min_replicas"] = fleet.scaling.min_replicas
    return document


def trace_digest(trace: Trace) -> str:
    """Return a digest of the requests, without the trace's name and its provenance."""
    summed = hashlib.sha256(repr(trace.requests).encode())
    marks = [(r.priority, r.lora_id) for r in trace.requests]
    if set(marks) != {(0, None)}:  # traces without marks keep the digests of earlier versions
        summed.update(repr(marks).encode())
    if any(r.n > 1 for r in trace.requests):
        summed.update(repr([r.n for r in trace.requests]).encode())
    classes = [(r.tier, r.tenant) for r in trace.requests]
    if set(classes) != {(None, None)}:
        summed.update(repr(classes).encode())
    turns = [(r.think_s, r.program_s) for r in trace.requests]
    if set(turns) != {(None, None)}:
        summed.update(repr(turns).encode())
    if trace.prefix_block_tokens not in (None, _USUAL_BLOCK_TOKENS):
        summed.update(repr(trace.prefix_block_tokens).encode())
    late = [r.on_infeasible for r in trace.requests]
    if set(late) != {OnInfeasible.REJECT}:
        summed.update(repr(late).encode())
    return summed.hexdigest()


def model_digest(model: FittedModel) -> str:
    """Return a digest of all that predictions depend on."""
    return digest([model.form, model.parameters(), model.held_out_error.get("under_p99", 0.0)])
