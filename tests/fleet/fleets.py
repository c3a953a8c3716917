"""Small fleets and traces on which every time can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slosched.core import NO_SLO, SLO, Request
from slosched.fleet.router import R, Router
from slosched.fleet.view import ReplicaKind
from slosched.perfmodel import LinearCoefficients, LinearModel
from slosched.simulator.simulate import SimulationConfig
from slosched.workload.trace import Trace, TraceRequest

A_SECOND_A_STEP = LinearModel(LinearCoefficients(0, 0, 0, 0, 0, 0, constant_s=1.0))
TWO_SECONDS_A_STEP = LinearModel(LinearCoefficients(0, 0, 0, 0, 0, 0, constant_s=2.0))


def make_trace(*lines: tuple[float, int, int], slo: SLO = NO_SLO) -> Trace:
    """Make a trace from (arrival_s, prompt tokens, output tokens) of each request."""
    requests = [TraceRequest(f"r{i}", *line, slo) for i, line in enumerate(lines)]
    return Trace.of(requests, "test")


def make_replicas(
    num: int, model: LinearModel = A_SECOND_A_STEP, kv_tokens: int = 4096
) -> list[ReplicaKind]:
    return [ReplicaKind(model, SimulationConfig(num_blocks=kv_tokens // 16))] * num


@dataclass
class Noting(Router):
    """Sends request i to the replica that `plan` names, and notes what `look` sees of each."""

    plan: Sequence[int] = ()
    seen: list[list[int]] = field(default_factory=list)

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        self.seen.append([replica.num_requests for replica in replicas])
        index = self.plan[len(self.seen) - 1] if self.plan else 0
        return next(replica for replica in replicas if replica.index == index)
