"""The questions: traffic, promises, replicas, and the routers that are tried."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from slosched.core import SLO
from slosched.evaluate.capacity import window
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.fleet.setup import FleetSetup
from slosched.fleet.simulate import FleetConfig
from slosched.fleet.view import ReplicaKind
from slosched.kv import PrefixCaching
from slosched.perfmodel import load_model
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Tiers, Trace, read_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"
POLICIES = ("fcfs", "goodput")
ROUTERS = (
    "round_robin",
    "power_of_two",
    "least_requests",
    "lmetric",
    "predicted_ttft",
    "cheapest_in_time",
)
H100, L40S = "h100/llama-3.1-8b", "l40s/llama-3.1-8b"

_ONE_TIER = Tiers((SLO(1.0, 0.05),), (1.0,))
_THREE_TIERS = Tiers((SLO(0.5, 0.03), SLO(2.0, 0.05), SLO(10.0, 0.1)), (0.3, 0.4, 0.3))
_LONG_PROMPTS = Tiers((SLO(3.0, 0.03), SLO(10.0, 0.05), SLO(30.0, 0.1)), (0.3, 0.4, 0.3))


@dataclass(frozen=True)
class Question:
    """One kind of traffic on one fleet, at several rates."""

    name: str
    trace: str
    promise: Tiers
    rates: tuple[float, ...]
    """Requests/s of the whole fleet."""
    num_requests: int
    """Of each window."""
    num_windows: int = 5
    devices: tuple[str, ...] = (H100,) * 4
    routers: tuple[str, ...] = ROUTERS
    delay_s: float = 0.0
    prefix_cache: PrefixCaching = PrefixCaching.OFF

    def traffic(self, index: int, rate: float) -> Trace:
        """Return a window of the trace, with promises, at this rate."""
        return (
            window(_read(self.trace), self.num_requests, index)
            .with_slo(self.promise)
            .scaled_to(rate)
        )

    def fleet(self, router: str) -> FleetSetup:
        """Return the fleet behind a router."""
        kinds = {name: self._kind(name) for name in dict.fromkeys(self.devices)}
        replicas = tuple(kinds[name] for name in self.devices)
        return FleetSetup(replicas, self.devices, router, FleetConfig(delay_s=self.delay_s))

    def _kind(self, name: str) -> ReplicaKind:
        model = load_model(name)
        num_blocks = kv_capacity_tokens(model) // 16
        return ReplicaKind(
            model, SimulationConfig(num_blocks=num_blocks, prefix_cache=self.prefix_cache)
        )


@cache
def _read(name: str) -> Trace:
    return read_trace(TRACES / name)


_CONV = "azure_conv_2023.csv"
_PLAIN = Question("conversations", _CONV, _ONE_TIER, (84.0, 100.0), 3000)

QUESTIONS = (
    _PLAIN,
    replace(
        _PLAIN,
        name="conversations, views 500 ms late",
        delay_s=0.5,
        rates=(84.0,),
        routers=("power_of_two", "least_requests", "predicted_ttft"),
    ),
    Question(
        "shared prefixes, three tiers",
        "mooncake_conversation.jsonl",
        _LONG_PROMPTS,
        (4.0,),
        400,
        num_windows=4,
        routers=("round_robin", "least_requests", "prefix_affine", "lmetric", "cheapest_in_time"),
        prefix_cache=PrefixCaching.HASH,
    ),
    replace(
        _PLAIN,
        name="unequal devices",
        devices=(H100, H100, L40S, L40S),
        rates=(60.0,),
        num_windows=4,
        routers=("round_robin", "least_requests", "lmetric", "predicted_ttft", "cheapest_in_time"),
    ),
    replace(
        _PLAIN,
        name="conversations, three tiers",
        promise=_THREE_TIERS,
        rates=(100.0,),
        num_windows=4,
        routers=("round_robin", "least_requests", "lmetric", "slo_bins", "cheapest_in_time"),
    ),
)
