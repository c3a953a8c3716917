"""The speed of the simulator: requests and steps per CPU second, and its peak memory.

    python benchmarks/simulator.py                              # at mean batches of 16, 64 and 128
    python benchmarks/simulator.py --rate-factor 1 -n 19366     # Azure's whole trace, as it came
    python benchmarks/simulator.py --rate-factor 4 -n 19366     # the same near saturation
    python benchmarks/simulator.py --policy fcfs --mean-batch 32

The requests are those of Azure's conversation trace of 2023, played faster or slower. Where the
file is absent, a generator fitted to it draws them.  CPU seconds are those of the event loop alone;
steps are counted in another replay before it.  Every policy runs in its own process, so that peak
memory is measured for each.
"""

from __future__ import annotations

import gc
import math
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as RichTable

from slosched.core import SLO, Limits, Request
from slosched.metrics import StepRow
from slosched.perfmodel import load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, read_trace, synthesize

AZURE_CONV = Path(__file__).parents[2] / "shared" / "traces" / "azure_conv_2023.csv"
MODEL = "h100/llama-3.1-8b"
SLO_OF_ALL = SLO(ttft_s=1.0, tpot_s=0.05)
MEAN_BATCHES = (16.0, 64.0, 128.0)
PILOT_REQUESTS = 1000
COLUMNS = (
    "policy",
    "offered/s",
    "requests",
    "steps",
    "mean batch",
    "CPU s",
    "requests/s",
    "steps/s",
    "peak MiB",
)


@dataclass(frozen=True)
class Case:
    """One replay to be measured."""

    policy: str
    num_requests: int
    rate_factor: float

    def at(self, rate_factor: float, num_requests: int | None = None) -> Case:
        return Case(self.policy, num_requests or self.num_requests, rate_factor)

    def trace(self) -> Trace:
        if AZURE_CONV.exists():
            trace = read_trace(AZURE_CONV).head(self.num_requests)
        else:
            trace = synthesize("azure_conv", num_requests=self.num_requests)
        return trace.scaled_to(trace.rate * self.rate_factor).with_slo(SLO_OF_ALL)


@dataclass(frozen=True)
class Speed:
    """The speed and the memory of one replay."""

    rate: float
    num_requests: int
    num_steps: int
    mean_batch: float
    cpu_s: float
    peak_mib: float

    def row(self, policy: str) -> tuple[str, ...]:
        return (
            policy,
            f"{self.rate:.1f}",
            f"{self.num_requests:,}",
            f"{self.num_steps:,}",
            f"{self.mean_batch:.1f}",
            f"{self.cpu_s:.2f}",
            f"{self.num_requests / self.cpu_s:,.0f}",
            f"{self.num_steps / self.cpu_s:,.0f}",
            f"{self.peak_mib:,.0f}",
        )


def measure(case: Case) -> Speed:
    """Measure one replay; the latency model and the trace are made before the clock starts."""
    trace, model = case.trace(), load_model(MODEL)
    num_steps, mean_batch = count_steps(case)
    gc.collect()
    start_s = time.process_time()
    simulate(trace, make_policy(case.policy), model, replica())
    cpu_s = time.process_time() - start_s
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Speed(trace.rate, len(trace), num_steps, mean_batch, cpu_s, peak_kib / 1024)


def count_steps(case: Case) -> tuple[int, float]:
    """Return the steps of a replay, and the mean number of requests served in each."""
    num_steps = num_served = 0

    def on_row(row: StepRow, _ended: Sequence[Request]) -> None:
        nonlocal num_steps, num_served
        num_steps += 1
        num_served += row.num_running

    simulate(case.trace(), make_policy(case.policy), load_model(MODEL), replica(), on_row=on_row)
    return num_steps, num_served / num_steps


def replica() -> SimulationConfig:
    capacity = int(load_model(MODEL).provenance.get("kv_capacity_tokens", 400_000))
    return SimulationConfig(Limits(), num_blocks=capacity // 16)


def rate_factor_for(mean_batch: float, case: Case) -> float:
    """Find the rate factor at which a short replay has batches of this mean size.

    Returns the largest factor that is tried if no replay has such batches.
    """
    low, high = 0.25, 16.0
    for _ in range(8):
        middle = math.sqrt(low * high)
        _, batch = count_steps(case.at(middle, min(case.num_requests, PILOT_REQUESTS)))
        low, high = (middle, high) if batch < mean_batch else (low, middle)
    return high


def main(
    policy: Annotated[list[str] | None, typer.Option(help="Once for each.")] = None,
    num_requests: Annotated[int, typer.Option("--num-requests", "-n", min=2)] = 3000,
    mean_batch: Annotated[
        list[float] | None, typer.Option(min=1, help="Play so fast that batches have this size.")
    ] = None,
    rate_factor: Annotated[
        float | None, typer.Option(min=1e-3, help="Times the trace's rate, instead.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="The fastest of so many counts.")] = 1,
) -> None:
    """Print one row for each policy and batch size."""
    table = RichTable(*COLUMNS, title=MODEL, title_justify="left")
    for name in policy or ["sarathi", "slo_aware", "goodput"]:
        case = Case(name, num_requests, rate_factor or 1.0)
        factors = [case.rate_factor]
        if rate_factor is None:
            factors = [rate_factor_for(size, case) for size in mean_batch or MEAN_BATCHES]
        for factor in factors:
            speeds = [_alone(case.at(factor)) for _ in range(repeat)]
            table.add_row(*min(speeds, key=lambda speed: speed.cpu_s).row(name))
    Console(width=120).print(table)


def _alone(case: Case) -> Speed:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(measure, case).result()


if __name__ == "__main__":
    typer.run(main)
