"""slosched's side of `peers.py`: one replay in its own process.

python benchmarks/peer_slosched.py SETUP.json
"""

from __future__ import annotations

import csv
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from slosched import __version__
from slosched.core import Limits
from slosched.perfmodel import load_model
from slosched.policy import Sarathi
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload.trace import Trace, TraceRequest


def read_requests(path: str) -> Trace:
    with Path(path).open(newline="") as file:
        rows = [
            TraceRequest(
                str(number),
                float(row["arrived_at"]),
                int(row["num_prefill_tokens"]),
                int(row["num_decode_tokens"]),
            )
            for number, row in enumerate(csv.DictReader(file))
        ]
    return Trace.of(rows, "peers")


def measure(setup: dict[str, Any]) -> dict[str, Any]:
    """Time a first replay, as a user would run it, and count steps in a second one."""
    trace, model = read_requests(setup["requests"]), load_model(setup["model"])
    limits = Limits(setup["chunk_tokens"], setup["max_num_seqs"])
    config = SimulationConfig(limits, setup["num_blocks"], setup["block_size"])
    policy = Sarathi(token_budget=setup["chunk_tokens"])
    gc.collect()
    start_s = time.process_time()
    ended = simulate(trace, policy, model, config)
    cpu_s = time.process_time() - start_s
    steps: list[None] = []
    simulate(trace, policy, model, config, on_row=lambda _row, _ended: steps.append(None))
    latencies = [r.end_s - r.arrival_s for r in ended if r.end_s is not None]
    return {
        "version": __version__,
        "cpu_s": cpu_s,
        "steps": len(steps),
        "completed": len(latencies),
        "mean_e2e_s": sum(latencies) / len(latencies),
    }


if __name__ == "__main__":
    json.dump(measure(json.loads(Path(sys.argv[1]).read_text())), sys.stdout)
