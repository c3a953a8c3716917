"""The cells of the study: requests, promises and replicas, some of which turn in the middle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from experiments.arena.scenarios import NOISE, TRACES
from slosched.core import SLO, Limits
from slosched.evaluate.capacity import window
from slosched.evaluate.judge.promises import PROMISES
from slosched.perfmodel import FittedModel, load_model
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace, TraceRequest, read_trace

CONVERSATIONS, CODE = "azure_conv_2023.csv", "azure_code_2023.csv"
H100, L40S = "h100/llama-3.1-8b", "l40s/llama-3.1-8b"
DESIGN, REPORT = "design", "report"
_FIRST_WINDOW = {DESIGN: 0, REPORT: 2}
"""The first window of a trace that is played; windows follow one another."""
_WARM_UP = 0.25
"""Share of a window whose requests are not judged."""
SETTLING_S = 20.0
"""Time after a turn whose arrivals are not judged."""
_POISON_TPOT_S = 0.005
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Part:
    """Requests of one trace at one rate, under one promise."""

    trace: str
    rate: float
    promise: str
    num_requests: int

    def requests(self, model: FittedModel, index: int) -> list[TraceRequest]:
        """Return those of one window of the trace, the first of which arrives at 0."""
        cut = window(read_trace(TRACES / self.trace), self.num_requests, index)
        return list(
            cut.scaled_to(self.rate).with_slo(PROMISES[self.promise](model, index)).requests
        )


@dataclass(frozen=True)
class Cell:
    """Requests and a replica; of several parts, each begins when the one before it ends."""

    name: str
    model: str
    parts: tuple[Part, ...]
    poison: int = 0
    """One request in so many gets a TPOT of 5 ms, which the device cannot keep; 0 for none."""
    kv_divisor: int = 1
    slowness: float = 1.0
    """Factor on the device's steps in the second half of the window."""
    limits: Limits = field(default_factory=Limits)

    @property
    def turns(self) -> bool:
        """Tell whether traffic or device change in the middle."""
        return len(self.parts) > 1 or self.slowness != 1

    def play(self, kind: str, index: int) -> Play:
        """Return what is played in window number `index` for the design or for the report."""
        number = _FIRST_WINDOW[kind] + index
        model = load_model(self.model)
        requests: list[TraceRequest] = []
        turn_s = 0.0
        for k, part in enumerate(self.parts):
            turn_s = requests[-1].arrival_s if requests else 0.0
            requests += [
                replace(r, request_id=f"{k}.{r.request_id}", arrival_s=r.arrival_s + turn_s)
                for r in part.requests(model, number)
            ]
        if self.poison:
            requests = [
                replace(r, slo=SLO(r.slo.ttft_s, _POISON_TPOT_S)) if i % self.poison == 0 else r
                for i, r in enumerate(requests)
            ]
        trace = Trace.of(requests, self.name)
        slowness: tuple[tuple[float, float], ...] = ()
        if self.slowness != 1:
            turn_s = trace.duration_s / 2
            slowness = ((0.0, 1.0), (turn_s, self.slowness))
        config = SimulationConfig(
            limits=self.limits,
            num_blocks=int(model.provenance["kv_capacity_tokens"])
            // _BLOCK_SIZE
            // self.kv_divisor,
            disturbances=Disturbances(noise=NOISE, slowness=slowness),
            online=True,
            seed=number,
        )
        judged_from_s = turn_s + SETTLING_S if self.turns else _WARM_UP * trace.duration_s
        return Play(trace, model, config, judged_from_s)


@dataclass(frozen=True)
class Play:
    """One window of a cell, ready to be simulated."""

    trace: Trace
    model: FittedModel
    config: SimulationConfig
    judged_from_s: float
    """Arrivals from then on are judged."""


CELLS = {
    cell.name: cell
    for cell in (
        Cell(
            "H100, conversations, medium, a tenth with a TPOT of 5 ms",
            H100,
            (Part(CONVERSATIONS, 16.0, "medium", 1800),),
            poison=10,
        ),
        Cell("L40S, conversations, mixed", L40S, (Part(CONVERSATIONS, 3.6, "mixed", 600),)),
        Cell("L40S, conversations, medium", L40S, (Part(CONVERSATIONS, 4.2, "medium", 600),)),
        Cell("H100, conversations, tight", H100, (Part(CONVERSATIONS, 19.0, "tight", 2000),)),
        Cell(
            "H100, conversations, medium, KV cache ÷ 8",
            H100,
            (Part(CONVERSATIONS, 16.0, "medium", 1800),),
            kv_divisor=8,
        ),
        Cell("H100, code, medium", H100, (Part(CODE, 6.5, "medium", 800),)),
        Cell(
            "RTX 4090 with 3B, conversations, mixed",
            "rtx4090/llama-3.2-3b",
            (Part(CONVERSATIONS, 9.0, "mixed", 1400),),
        ),
        Cell(
            "4 × H100 with 70B, conversations, medium",
            "h100/llama-3.1-70b-tp4",
            (Part(CONVERSATIONS, 14.0, "medium", 2000),),
        ),
        Cell(
            "H100 with a mixture of experts (30B, 3B active), conversations, medium",
            "h100/qwen3-30b-a3b",
            (Part(CONVERSATIONS, 12.0, "medium", 1000),),
        ),
        Cell(
            "H100, medium, code after conversations",
            H100,
            (Part(CONVERSATIONS, 16.0, "medium", 1000), Part(CODE, 7.0, "medium", 500)),
        ),
        Cell(
            "H100, conversations, promises tightened from relaxed to tight",
            H100,
            (Part(CONVERSATIONS, 20.0, "relaxed", 1200), Part(CONVERSATIONS, 20.0, "tight", 1600)),
        ),
        Cell(
            "H100, conversations, medium, device slower by a half",
            H100,
            (Part(CONVERSATIONS, 17.0, "medium", 1800),),
            slowness=1.5,
        ),
    )
}
