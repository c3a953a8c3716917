"""A window of a cell under a policy: shares of good requests by block, and the replay's cost."""

from __future__ import annotations

import time

import numpy as np

from experiments.portfolio.cells import Play
from slosched.metrics import RequestRecord
from slosched.metrics.columns import RequestColumns
from slosched.metrics.promises import good_requests
from slosched.policy.portfolio.policy import Portfolio
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import simulate

NUM_BLOCKS = 8


def played(play: Play, spec: str) -> dict[str, object]:
    """Return the shares of good requests by block under a policy, and what the replay cost."""
    policy = make_policy(spec)
    began_s = time.process_time()
    requests = simulate(play.trace, policy, play.model, play.config)
    cpu_s = time.process_time() - began_s
    judged = [r for r in requests if r.arrival_s >= play.judged_from_s]
    columns = RequestColumns.of([RequestRecord.from_request(r) for r in judged])
    good = good_requests(columns, play.config.limits.deadline_rule)
    blocks = [float(block.mean()) for block in np.array_split(good, NUM_BLOCKS)]
    row: dict[str, object] = {
        "policy": spec,
        "num_judged": len(judged),
        "blocks": " ".join(f"{share:.6f}" for share in blocks),
        "device_s": round(max(r.end_s or 0.0 for r in requests), 1),
        "cpu_s": round(cpu_s, 2),
    }
    if isinstance(policy, Portfolio):
        row["replays_cpu_s"] = round(policy.cpu_s, 2)
        row["num_evaluations"] = policy.num_evaluations
        row["num_changes"] = policy.num_changes
    return row
