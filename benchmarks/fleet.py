"""The speed of a simulated fleet: CPU time for each request, by router and number of replicas.

    python benchmarks/fleet.py                                # 10, 100 and 1,000 replicas
    python benchmarks/fleet.py --replicas 1000 --seconds 60 --router power_of_two

Every replica gets the same share of the traffic, 5 requests/s: made-up arrivals with the lengths of
Azure's conversations.  CPU seconds are those of the simulation alone.  Peak memory is that
of the process so far: measure one fleet alone to know what it takes.
"""

from __future__ import annotations

import gc
import resource
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as RichTable

from slosched.core import SLO
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.fleet.simulate import simulate_fleet
from slosched.fleet.spec import make_router
from slosched.fleet.view import ReplicaKind
from slosched.perfmodel import load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import synthesize

MODEL = "h100/llama-3.1-8b"
RATE_OF_ONE = 5.0
COLUMNS = ("router", "replicas", "requests", "CPU s", "µs/request", "requests/CPU s", "peak MiB")


def measure(router: str, policy: str, num_replicas: int, seconds: float) -> tuple[str, ...]:
    """Return a row of the table: one replay, after its trace and models are made."""
    model = load_model(MODEL)
    config = SimulationConfig(num_blocks=kv_capacity_tokens(model) // 16)
    rate = RATE_OF_ONE * num_replicas
    trace = synthesize("azure_conv", num_requests=round(rate * seconds)).scaled_to(rate)
    trace = trace.with_slo(SLO(ttft_s=1.0, tpot_s=0.05))
    replicas = [ReplicaKind(model, config)] * num_replicas
    gc.collect()
    start_s = time.process_time()
    simulate_fleet(trace, make_policy(policy), replicas, make_router(router))
    cpu_s = time.process_time() - start_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        router,
        f"{num_replicas:,}",
        f"{len(trace):,}",
        f"{cpu_s:.2f}",
        f"{1e6 * cpu_s / len(trace):.0f}",
        f"{len(trace) / cpu_s:,.0f}",
        f"{peak_mib:,.0f}",
    )


def main(
    router: Annotated[list[str] | None, typer.Option(help="Once for each.")] = None,
    replicas: Annotated[list[int] | None, typer.Option(min=1, help="Once for each.")] = None,
    policy: Annotated[str, typer.Option(help="The policy in the engines.")] = "fcfs",
    seconds: Annotated[float, typer.Option(min=1, help="Length of the traffic.")] = 20.0,
    repeat: Annotated[int, typer.Option(min=1, help="The fastest of so many counts.")] = 1,
) -> None:
    """Print one row for each router and number of replicas."""
    table = RichTable(*COLUMNS, title=f"{MODEL}, {policy}", title_justify="left")
    for name in router or ["round_robin", "power_of_two", "least_requests"]:
        for number in replicas or [10, 100, 1000]:
            rows = [measure(name, policy, number, seconds) for _ in range(repeat)]
            table.add_row(*min(rows, key=lambda row: float(row[3])))
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
