"""`python -m experiments.portfolio`: is `portfolio` as good as the best of its candidates?

Every window of a cell is played under each candidate and under `portfolio`.  The judged requests
are cut into blocks, so that differences come with intervals: all policies serve the same requests.
"""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from experiments.command import add_report, make_app, provenance, start
from experiments.portfolio import report
from experiments.portfolio.cells import CELLS, DESIGN, REPORT, Play
from slosched.cli.console import console
from slosched.metrics import RequestRecord
from slosched.metrics.columns import RequestColumns
from slosched.metrics.promises import good_requests
from slosched.policy.portfolio.policy import Portfolio, default_candidates
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import simulate

app = make_app(__doc__)
NUM_BLOCKS = 8
PORTFOLIO = "portfolio"


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


@app.command()
def run(
    kind: Annotated[str, typer.Option(help=f"The windows to play: {DESIGN} or {REPORT}.")] = REPORT,
    windows: Annotated[int, typer.Option(min=1, help="Windows of each cell.")] = 2,
    only: Annotated[
        list[str] | None, typer.Option(help="Play only cells whose name contains this text.")
    ] = None,
) -> None:
    """Play all cells and make the page: about half an hour of one core.

    Example: `python -m experiments.portfolio run --windows 2`.

    The results of each cell are written when it is done, in place of those that it had.
    """
    if kind not in (DESIGN, REPORT):
        raise ValueError(f"--kind {kind!r} is neither {DESIGN} nor {REPORT}")
    names = [name for name in CELLS if not only or any(text in name for text in only)]
    if not names:
        raise ValueError(f"no cell is named like {only}; there are {', '.join(CELLS)}")
    for name in names:
        rows = []
        for index in range(windows):
            play = CELLS[name].play(kind, index)
            for spec in (*default_candidates(), PORTFOLIO):
                row = {"kind": kind, "cell": name, "window": index, **played(play, spec)}
                rows.append(row)
        report.replace_cell(pd.DataFrame(rows), provenance("portfolio"))
        console.print(f"{name}: done")
    make_report()


make_report = add_report(app, "portfolio", report.PAGE, report.write)

if __name__ == "__main__":
    start(app)
