"""What a server at three times its capacity promises, measured over HTTP against its goals.

What would have become of those whom it rejects cannot be seen from outside;
`python -m experiments.quotes` simulates that.  In slow
motion (`--slowdown 4`) times are those of the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from slosched.core import EndReason, RequestStatus
from slosched.metrics import RequestRecord
from slosched.replay.client import replay
from soak.stage import Stage, add_options, num_good, share_good
from soak.verdicts import Verdicts, machine, say

_LATE = "goodput"
_ON_ARRIVAL = (EndReason.OVERLOAD, EndReason.UNKEEPABLE)


def on_arrival(records: Sequence[RequestRecord]) -> str:
    """Return in words what became of a replay's requests."""
    rejected = [r for r in records if r.status is RequestStatus.REJECTED]
    num_known = sum(r.end_reason in _ON_ARRIVAL for r in rejected)
    return (
        f"{num_good(records)} good of {len(records)}, {len(rejected)} rejected, "
        f"of which {num_known} on arrival"
    )


def judge_rejections(stage: Stage, policy: str, verdicts: Verdicts) -> None:
    """Replay three times the capacity, with refusals on arrival and with late ones."""
    trace = stage.trace(3.0)
    found = {}
    for each in (_LATE, policy):
        say(f"{each}, simulated: {on_arrival(stage.simulated(trace, each))}")
        with stage.served(each) as url:
            report = replay(trace, url)
        found[each] = report.records
        say(
            f"{each}, at {trace.rate:.1f}/s, sent up to {1000 * report.max_lateness_s:.0f} ms "
            f"late, errors {report.errors}: {on_arrival(report.records)}"
        )
    records = found[policy]
    rejected = [r for r in records if r.status is RequestStatus.REJECTED]
    admitted = [r for r in records if r.end_reason not in _ON_ARRIVAL]
    waits_ms = [1000 / stage.slowdown * ((r.end_s or 0.0) - r.arrival_s) for r in rejected]
    verdicts.at_least("requests that are rejected", len(rejected), 1)
    if not rejected:
        return
    for share, goal_ms in ((50, 20), (99, 100)):
        wait_ms = float(np.percentile(waits_ms, share))
        verdicts.at_most(f"time until a rejection is told, p{share}", wait_ms, goal_ms, " ms")
    verdicts.at_least("in time, of those not refused", 100 * share_good(admitted), 98, " %")
    gained = 100 * num_good(records) / num_good(found[_LATE])
    verdicts.at_least("good requests, of those with late refusals", gained, 98, " %")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak.overload", description=__doc__)
    add_options(parser)
    options = parser.parse_args()
    verdicts = Verdicts()
    stage = Stage.on(options.device, options.requests, options.slowdown)
    say(f"{machine()}; {stage}")
    judge_rejections(stage, options.policy, verdicts)
    say(machine())
    return verdicts.report()


if __name__ == "__main__":
    sys.exit(main())
