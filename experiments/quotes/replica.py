"""The replica and the traffic on which quotes are judged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from zlib import crc32

from slosched.core import (
    NO_SLO,
    SLO,
    DeadlineRule,
    EndReason,
    LatencyModel,
    Policy,
    Refusal,
    Request,
)
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.perfmodel import FittedModel, load_model
from slosched.policy import Door
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Proportional, Tiers, Trace, synthesize


@dataclass(frozen=True)
class Cell:
    """A device with a model, a kind of trace, and the rate that is called a load of 1.

    A request's SLO is a TTFT of `ttft_s` plus twice its own prefill, and a TPOT of `tpot_s`.
    """

    device: str
    kind: str
    rate: float
    name: str = "llama-3.1-8b"
    ttft_s: float = 1.0
    tpot_s: float = 0.05

    def __str__(self) -> str:
        return (
            f"{self.device}/{self.name}, {self.kind}, "
            f"{1000 * self.ttft_s:g} and {1000 * self.tpot_s:g} ms"
        )

    @property
    def model(self) -> FittedModel:
        return load_model(f"{self.device}/{self.name}")

    @property
    def config(self) -> SimulationConfig:
        """Return a replica with 5 % noise on every step and a latency model that learns online."""
        return SimulationConfig(
            num_blocks=kv_capacity_tokens(self.model) // 16,
            disturbances=Disturbances(noise=0.05),
            online=True,
        )

    def trace(self, load: float, num_requests: int, seed: int) -> Trace:
        trace = synthesize(self.kind, num_requests=num_requests, rate=load * self.rate, seed=seed)
        return trace.with_slo(
            Proportional(self.model.predict_prefill, 2.0, self.tpot_s, self.ttft_s)
        )

    def burst(self, burst_s: float, seed: int) -> Trace:
        """Return a burst at a load of 3, then 60 s at a load of 0.6."""
        burst = self.trace(3.0, int(3 * self.rate * burst_s), seed).requests
        calm = self.trace(0.6, int(0.6 * self.rate * 60), seed + 1).requests
        end_s = burst[-1].arrival_s
        moved = [
            replace(r, request_id=f"calm-{r.request_id}", arrival_s=end_s + r.arrival_s)
            for r in calm
        ]
        return Trace.of([*burst, *moved], "burst")

    def play(self, policy: Policy, trace: Trace) -> list[Request]:
        return simulate(trace, policy, self.model, self.config)


class NotingDoor(Door):
    """A door that notes the quantiles of the TTFT that it quotes for each arrival."""

    def reset(self) -> None:
        super().reset()
        self.ttft_s: dict[str, dict[float, float]] = {}

    def judge(self, request: Request, model: LatencyModel, rule: DeadlineRule) -> Refusal | None:
        self.ttft_s[request.request_id] = dict(self.quote(request, model).ttft_s)
        return super().judge(request, model, rule)


class LettingIn(Door):
    """A door that lets in a random share of those whom it refuses, behind all others.

    Such a request has no SLO while it is served, so that it makes no other late.  The door does not
    know of it.
    """

    share = 0.1

    def reset(self) -> None:
        super().reset()
        self.promised: dict[str, SLO] = {}
        """The SLOs that those let in had asked for, by request id."""

    def judge(self, request: Request, model: LatencyModel, rule: DeadlineRule) -> Refusal | None:
        refusal = super().judge(request, model, rule)
        if refusal is None or refusal.reason is not EndReason.OVERLOAD or not self._draws(request):
            return refusal
        self.promised[request.request_id] = request.slo
        request.slo = NO_SLO
        return None

    def is_new(self, request: Request) -> bool:
        return request.request_id not in self.promised and super().is_new(request)

    def _draws(self, request: Request) -> bool:
        return crc32(request.request_id.encode()) < self.share * (1 << 32)


class LettingInAlike(LettingIn):
    """A door that lets in a random share of those whom it refuses, like all others."""

    def judge(self, request: Request, model: LatencyModel, rule: DeadlineRule) -> Refusal | None:
        refusal = super().judge(request, model, rule)
        if request.request_id in self.promised:
            request.slo = self.promised[request.request_id]
        return refusal


TIERS = Tiers((SLO(0.5, 0.05), SLO(2.0, 0.05), SLO(10.0, 0.1)), (0.3, 0.4, 0.3))

CELLS = (
    Cell("l40s", "azure_conv", 4),
    Cell("h100", "azure_conv", 20),
    Cell("h100", "azure_code", 12),
)

HELD_OUT = (
    Cell("h200", "sharegpt", 8, "qwen3-8b", ttft_s=0.5, tpot_s=0.03),
    Cell("a100", "azure_conv", 10, ttft_s=2.0, tpot_s=0.1),
    Cell("rtx4090", "azure_code", 2, "llama-3.2-3b"),
    Cell("h100", "azure_conv", 11, "qwen3-30b-a3b"),
    Cell("l4", "azure_conv", 3, "llama-3.2-3b", ttft_s=3.0, tpot_s=0.1),
)
"""Cells that were not looked at while the door was designed."""
