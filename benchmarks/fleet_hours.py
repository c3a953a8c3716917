"""The speed of hours of a large fleet behind `round_robin`, in several processes.

    python benchmarks/fleet_hours.py                                    # a minute of 1,000
    python benchmarks/fleet_hours.py --seconds 3600 --replicas 20 --jobs 1    # an hour of 20

Every replica gets the same share of the traffic, 5 requests/s: made-up arrivals with the lengths of
Azure's conversations.  The trace is made before the clock starts.  CPU seconds are those of all
processes, with their start; peak memory is that of this process, and of the largest worker.
"""

from __future__ import annotations

import os
import resource
import time
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from slosched.core import SLO
from slosched.evaluate.capacity.pool import local_pool
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.evaluate.long_fleets import play_long
from slosched.fleet.spec import make_router
from slosched.fleet.view import ReplicaKind
from slosched.perfmodel import load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig
from slosched.workload.synthetic import synthesize_long

MODEL = "h100/llama-3.1-8b"
RATE_OF_ONE = 5.0
SLO_OF_ALL = SLO(ttft_s=1.0, tpot_s=0.05)


def main(
    replicas: Annotated[int, typer.Option(min=1)] = 1000,
    seconds: Annotated[float, typer.Option(min=1, help="Length of the traffic.")] = 60.0,
    policy: Annotated[str, typer.Option(help="The policy in the engines.")] = "fcfs",
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
) -> None:
    """Play the fleet, and print what it took and how its requests fared."""
    model = load_model(MODEL)
    kind = ReplicaKind(model, SimulationConfig(num_blocks=kv_capacity_tokens(model) // 16))
    rate = RATE_OF_ONE * replicas
    trace = synthesize_long("azure_conv", round(rate * seconds), rate, slo=SLO_OF_ALL)
    wall_s, cpu_s = time.monotonic(), _cpu_s()
    rows = play_long(
        trace,
        make_policy(policy),
        (kind,) * replicas,
        make_router("round_robin"),
        make_pool=local_pool(jobs),
    )
    wall_s, cpu_s = time.monotonic() - wall_s, _cpu_s() - cpu_s
    own_mib, worker_mib = (
        resource.getrusage(who).ru_maxrss / 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    ttft_s = np.nanpercentile(rows.ttft_s, 99)
    Console(width=120).print(
        f"{MODEL}, {policy}: {len(rows):,} requests on {replicas:,} replicas, "
        f"{100 * rows.attainment:.2f} % in time, TTFT p99 {ttft_s:.3f} s\n"
        f"{jobs} processes: {wall_s:.1f} s, {cpu_s:.1f} CPU s, "
        f"{1e6 * cpu_s / len(rows):.0f} CPU µs a request\n"
        f"peak MiB: {own_mib:,.0f} here, {worker_mib:,.0f} in the largest worker\n"
        f"load average {os.getloadavg()[0]:.1f}"
    )


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    typer.run(main)
