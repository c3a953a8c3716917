"""What a server at three times its capacity promises, measured over HTTP against its goals.

Azure's conversations are replayed, from the file in `../shared` or, where that is absent, made up.
The load of 1 is the highest rate of which 99 % are in time in the simulator.  What would have become
of those whom it rejects cannot be seen from outside; `python -m experiments.quotes` simulates that.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.quotes.replica import Cell
from slosched.core import DeadlineRule, EndReason, RequestStatus
from slosched.evaluate.capacity import Contender, Plan, Study, Sweep, local_pool
from slosched.metrics import RequestRecord, is_good
from slosched.replay.client import replay
from slosched.workload import Proportional, Trace, read_trace, synthesize
from soak.program import program
from soak.verdicts import Verdicts, machine, say

_CONVERSATIONS = Path(__file__).parents[3] / "shared" / "traces" / "azure_conv_2023.csv"
_DEFAULT, _LATE = "goodput+door", "goodput"
_IN_TIME = 0.99
_ON_ARRIVAL = (EndReason.OVERLOAD, EndReason.UNKEEPABLE)


@dataclass(frozen=True)
class Stage:
    """An emulated device, the requests that are sent to it, and the rate that it can keep."""

    cell: Cell
    conversations: Trace
    capacity: float

    @classmethod
    def on(cls, device: str, num_requests: int) -> Stage:
        """Return the stage with the capacity that the simulator finds."""
        cell = Cell(device, "azure_conv", 1.0)
        if _CONVERSATIONS.exists():
            trace = read_trace(_CONVERSATIONS, num_requests=num_requests)
        else:
            trace = synthesize(cell.kind, num_requests=num_requests, rate=1.0, seed=7)
        rule = Proportional(cell.model.predict_prefill, 2.0, cell.tpot_s, cell.ttft_s)
        trace = trace.with_slo(rule)
        contender = Contender(_DEFAULT, _DEFAULT, cell.model, str(cell), cell.config)
        sweep = Sweep([contender], [trace], Plan((_IN_TIME,)))
        sweep.run(local_pool(1))
        study = Study(list(sweep.measured.values()), [trace])
        return cls(cell, trace, study.capacity(_DEFAULT, _IN_TIME).requests_per_s)

    def trace(self, load: float) -> Trace:
        """Return the conversations at a load."""
        return self.conversations.scaled_to(load * self.capacity)

    @contextlib.contextmanager
    def served(self, policy: str) -> Iterator[str]:
        """Start a server with this policy; yield its URL."""
        name = f"{self.cell.device}/{self.cell.name}"
        with program(
            ("--emulate", name, "-p", policy, "--no-log-requests", "--log-interval", "off")
        ) as server:
            yield server.url


def num_good(records: Sequence[RequestRecord]) -> int:
    return sum(is_good(record, DeadlineRule.MEAN_TPOT) for record in records)


def share_good(records: Sequence[RequestRecord]) -> float:
    return num_good(records) / len(records)


def judge_rejections(stage: Stage, verdicts: Verdicts) -> None:
    """Replay three times the capacity, with refusals on arrival and with late ones."""
    trace = stage.trace(3.0)
    found = {}
    for policy in (_LATE, _DEFAULT):
        with stage.served(policy) as url:
            report = replay(trace, url)
        found[policy] = report.records
        say(
            f"{policy}: {num_good(report.records)} good of {len(trace)} at {trace.rate:.1f}/s, "
            f"sent up to {1000 * report.max_lateness_s:.0f} ms late, errors {report.errors}"
        )
    records = found[_DEFAULT]
    rejected = [r for r in records if r.status is RequestStatus.REJECTED]
    admitted = [r for r in records if r.end_reason not in _ON_ARRIVAL]
    waits_ms = [1000 * ((r.end_s or 0.0) - r.arrival_s) for r in rejected]
    verdicts.at_least("requests that are rejected", len(rejected), 1)
    if not rejected:
        return
    say(f"{len(rejected)} were rejected, {len(admitted)} were not refused on arrival")
    for share, goal_ms in ((50, 20), (99, 100)):
        wait_ms = float(np.percentile(waits_ms, share))
        verdicts.at_most(f"time until a rejection is told, p{share}", wait_ms, goal_ms, " ms")
    verdicts.at_least("in time, of those not refused", 100 * share_good(admitted), 98, " %")
    gained = 100 * num_good(records) / num_good(found[_LATE])
    verdicts.at_least("good requests, of those with late refusals", gained, 98, " %")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak.overload", description=__doc__)
    parser.add_argument("--device", default="l40s", help="with llama-3.1-8b")
    parser.add_argument("--requests", type=int, default=400)
    options = parser.parse_args()
    verdicts = Verdicts()
    stage = Stage.on(options.device, options.requests)
    say(f"{machine()}; capacity of {stage.cell}: {stage.capacity:.1f}/s")
    judge_rejections(stage, verdicts)
    say(machine())
    return verdicts.report()


if __name__ == "__main__":
    sys.exit(main())
