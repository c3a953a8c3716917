"""The replica and the traffic on which quotes are judged."""

from __future__ import annotations

from dataclasses import dataclass

from slosched.core import LatencyModel, Policy, Refusal, Request
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.perfmodel import FittedModel, load_model
from slosched.policy import Door
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Proportional, Trace, synthesize


@dataclass(frozen=True)
class Cell:
    """A device with Llama-3.1-8B, a kind of trace, and the rate that is called a load of 1.

    A request's SLO is a TTFT of 1 s plus twice its own prefill, and a TPOT of 50 ms.
    """

    device: str
    kind: str
    rate: float

    @property
    def model(self) -> FittedModel:
        return load_model(f"{self.device}/llama-3.1-8b")

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
        return trace.with_slo(Proportional(self.model.predict_prefill, 2.0, 0.05, 1.0))

    def play(self, policy: Policy, load: float, num_requests: int, seed: int) -> list[Request]:
        trace = self.trace(load, num_requests, seed)
        return simulate(trace, policy, self.model, self.config)


class NotingDoor(Door):
    """A door that notes the quantiles of the TTFT that it quotes for each arrival."""

    def reset(self) -> None:
        super().reset()
        self.ttft_s: dict[str, dict[float, float]] = {}

    def judge(self, request: Request, model: LatencyModel) -> Refusal | None:
        self.ttft_s[request.request_id] = dict(self.quote(request, model).ttft_s)
        return super().judge(request, model)


CELLS = (
    Cell("l40s", "azure_conv", 4),
    Cell("h100", "azure_conv", 20),
    Cell("h100", "azure_code", 12),
)
