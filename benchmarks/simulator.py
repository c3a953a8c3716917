"""How fast the simulator is: requests and steps per CPU second, and the memory they take.

    python benchmarks/simulator.py                              # 2,000 requests, natural rate
    python benchmarks/simulator.py --rate-factor 3 --num-requests 19366
    python benchmarks/simulator.py --policy fcfs --policy slo_aware

The requests are those of Azure's conversation trace of 2023, played `--rate-factor` times as fast;
where the file is absent, of a generator fitted to it.  CPU seconds are those of the event loop and
of nothing else; steps are counted in a replay before it.  Every policy runs in a process of its
own, so that its peak memory is its own.
"""

from __future__ import annotations

import gc
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as RichTable

from slosched.core import SLO, Limits
from slosched.engine.loop import StepRecord
from slosched.engine.simulate import SimulationConfig, simulate
from slosched.perfmodel import load_model
from slosched.policy.spec import make_policy
from slosched.workload import Trace, read_trace, synthesize

AZURE_CONV = Path(__file__).parents[2] / "shared" / "traces" / "azure_conv_2023.csv"
MODEL = "h100/llama-3.1-8b"
SLO_OF_ALL = SLO(ttft_s=1.0, tpot_s=0.05)
COLUMNS = (
    "policy",
    "requests",
    "steps",
    "mean batch",
    "CPU s",
    "requests/s",
    "steps/s",
    "peak MiB",
)


@dataclass(frozen=True)
class Speed:
    """What one replay cost."""

    num_requests: int
    num_steps: int
    num_chunks: int
    cpu_s: float
    peak_mib: float

    def row(self, policy: str) -> tuple[str, ...]:
        return (
            policy,
            f"{self.num_requests:,}",
            f"{self.num_steps:,}",
            f"{self.num_chunks / self.num_steps:.1f}",
            f"{self.cpu_s:.2f}",
            f"{self.num_requests / self.cpu_s:,.0f}",
            f"{self.num_steps / self.cpu_s:,.0f}",
            f"{self.peak_mib:,.0f}",
        )


def open_trace(num_requests: int, rate_factor: float) -> Trace:
    if AZURE_CONV.exists():
        trace = read_trace(AZURE_CONV).head(num_requests)
    else:
        trace = synthesize("azure_conv", num_requests=num_requests)
    if rate_factor != 1:
        trace = trace.scaled_to(trace.rate * rate_factor)
    return trace.with_slo(SLO_OF_ALL)


def measure(policy: str, num_requests: int, rate_factor: float) -> Speed:
    """One replay; the latency model and the trace are made before the watch starts."""
    trace, model = open_trace(num_requests, rate_factor), load_model(MODEL)
    blocks = int(model.provenance.get("kv_capacity_tokens", 400_000)) // 16
    config = SimulationConfig(Limits(), num_blocks=blocks)
    num_steps = num_chunks = 0

    def on_step(record: StepRecord) -> None:
        nonlocal num_steps, num_chunks
        num_steps += 1
        num_chunks += len(record.batch.chunks)

    simulate(trace, make_policy(policy), model, config, on_step=on_step)
    gc.collect()
    start_s = time.process_time()
    simulate(trace, make_policy(policy), model, config)
    cpu_s = time.process_time() - start_s
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Speed(len(trace), num_steps, num_chunks, cpu_s, peak_kib / 1024)


def main(
    policy: Annotated[list[str] | None, typer.Option(help="Once for each.")] = None,
    num_requests: Annotated[int, typer.Option("--num-requests", "-n", min=2)] = 2000,
    rate_factor: Annotated[float, typer.Option(min=1e-3, help="Times the trace's rate.")] = 1.0,
    repeat: Annotated[int, typer.Option(min=1, help="The fastest of so many counts.")] = 1,
) -> None:
    """One row a policy."""
    rate = open_trace(num_requests, rate_factor).rate
    title = f"{MODEL}, {rate:.1f} requests/s offered"
    table = RichTable(*COLUMNS, title=title, title_justify="left")
    for name in policy or ["sarathi", "slo_aware"]:
        speeds = [_alone(name, num_requests, rate_factor) for _ in range(repeat)]
        table.add_row(*min(speeds, key=lambda speed: speed.cpu_s).row(name))
    Console(width=120).print(table)


def _alone(policy: str, num_requests: int, rate_factor: float) -> Speed:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(measure, policy, num_requests, rate_factor).result()


if __name__ == "__main__":
    typer.run(main)
