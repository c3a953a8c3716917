"""`python -m experiments.goodput.lasting_flood`: long prompts that wait while blocks are short.

Prints the table of findings.md: the requests in time of traffic with long answers in a small KV
cache, under `goodput`, under variants that start the short prompts alone, and under `sjf`.  It
takes about half an hour.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import typer

from experiments.markdown import table
from slosched.batch import BatchBuilder
from slosched.cli.console import console, progress_bar
from slosched.core import (
    SLO,
    DeadlineRule,
    LatencyModel,
    Limits,
    Request,
    RequestStatus,
    SchedulerView,
)
from slosched.evaluate.capacity import Outcomes
from slosched.perfmodel import load_model
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.memory import will_be_filled
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.punctual import Timed
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import synthesize

_LEAST_ARRIVALS = 16
_FLOOD, _FILLED = 1.5, 1.2
"""What arrivals want, as a multiple of the cache, from which on long ones do not start, and what
those that start may want."""


@dataclass
class StartsTheShort(Goodput):
    """A variant in which only prompts start for which the KV cache has room in the long run.

    A request holds its blocks for as many steps as it emits tokens.  If those of the latest
    arrivals want more than the cache in the time in which they came, the shortest of them start.
    """

    in_debt: float = 0.0
    """What those that have begun need in turns, as a share of the cache, from which on it does so.
    Each needs its blocks as often as its TPOT asks for a step, and half of a mean answer more."""
    after_stays: float = 0.0
    """How long arrivals must have wanted too much, in times that an answer takes."""

    def reset(self) -> None:
        super().reset()
        self._flooded_since_s = math.inf

    def _prompts(
        self,
        batch: BatchBuilder,
        model: LatencyModel,
        view: SchedulerView,
        begun: Iterable[Request],
        pace: Callable[[], Pace],
    ) -> list[Timed]:
        """Return the prompts that are worth a try, without those for which there is no room."""
        prompts = super()._prompts(batch, model, view, begun, pace)
        most_tokens = self._most_tokens(pace, view)
        return [
            timed
            for timed in prompts
            if (request := timed[0]).num_prompt_tokens <= most_tokens
            or request.num_output_tokens
            or request.status is RequestStatus.RUNNING
        ]

    def _most_tokens(self, pace: Callable[[], Pace], view: SchedulerView) -> float:
        """Return the tokens of the longest prompt that may start."""
        arrivals, output_tokens = self._arrivals.latest, self._arrivals.stays.mean_of_latest()
        if not will_be_filled(0, view.kv):
            self._flooded_since_s = math.inf
            return math.inf
        if len(arrivals) < _LEAST_ARRIVALS or not output_tokens:
            return math.inf
        all_s, span_s = pace().all_s, view.now_s - arrivals[0].arrival_s
        lengths = sorted([a.num_tokens + a.num_cached_tokens for a in arrivals])
        stay_s = output_tokens * all_s
        wanted = list(accumulate([(n + output_tokens / 2) * stay_s for n in lengths]))
        room = view.kv.num_blocks * view.kv.block_size * span_s
        if wanted[-1] <= _FLOOD * room:
            if wanted[-1] <= room:
                self._flooded_since_s = math.inf
            return math.inf
        self._flooded_since_s = min(self._flooded_since_s, view.now_s)
        if view.now_s - self._flooded_since_s < self.after_stays * stay_s:
            return math.inf
        if self._share_needed(all_s, output_tokens / 2, view) <= self.in_debt:
            return math.inf
        return lengths[max(0, bisect_right(wanted, _FILLED * room) - 1)]

    def _share_needed(self, all_s: float, tokens_ahead: float, view: SchedulerView) -> float:
        """Return the share of the cache that all that have begun need in turns."""
        begun = [r for r in (*view.running, *view.waiting, *view.swapped) if r.num_output_tokens]
        needed = sum(
            [(r.num_tokens + tokens_ahead) * min(1.0, all_s / r.slo.tpot_s) for r in begun]
        )
        return needed / (view.kv.num_blocks * view.kv.block_size)


class Traffic(NamedTuple):
    """Requests of a kind on a device whose cache is small."""

    model: str
    kind: str
    num_requests: int
    rate: float
    num_blocks: int
    slo: SLO = SLO(5.0, 0.1)
    seed: int = 11

    def played(self, spec: str) -> list[Request]:
        """Return the requests as a policy leaves them."""
        trace = synthesize(self.kind, num_requests=self.num_requests, seed=self.seed)
        trace = trace.scaled_to(self.rate).with_slo(self.slo)
        config = SimulationConfig(Limits(), num_blocks=self.num_blocks)
        return simulate(trace, make_policy(spec), load_model(self.model), config)

    def num_good(self, spec: str) -> int:
        """Return the requests in time under a policy."""
        return int(Outcomes.of(self.played(spec), DeadlineRule.MEAN_TPOT).good.sum())

    def __str__(self) -> str:
        slo = f"{self.slo.ttft_s:g} s and {self.slo.tpot_s * 1e3:g} ms"
        return (
            f"{self.num_requests:,} of {self.kind} at {self.rate:g}/s, {self.model}, "
            f"{self.num_blocks:,} blocks, {slo}"
        )


TRAFFICS = (
    Traffic("l40s/llama-3.2-3b", "servegen_r1", 1600, 14, 8704),
    Traffic("l40s/llama-3.2-3b", "servegen_r1", 1600, 7, 8704),
    Traffic("h100/llama-3.1-8b", "servegen_r1", 1500, 30, 3400, seed=3),
    Traffic("h100/llama-3.1-8b", "servegen_r1", 1500, 15, 3400, seed=3),
    Traffic("h100/llama-3.1-8b", "servegen_r1", 1500, 10, 3400),
    Traffic("h200/qwen3-8b", "servegen_r1", 1500, 30, 5000, SLO(3.0, 0.05)),
    Traffic("a100/llama-3.1-8b", "sharegpt", 2000, 15, 1500, SLO(2.0, 0.06)),
    Traffic("h100/llama-3.1-8b", "servegen_r1", 600, 30, 3400, seed=3),
    Traffic("l40s/llama-3.1-8b", "servegen_r1", 150, 3, 1366, seed=3),
)
"""Overloads that last for longer than an answer, and at the end two bursts that do not."""
_OURS = "experiments.goodput.lasting_flood:"
POLICIES = {
    "`goodput`": "goodput",
    "at once": f"{_OURS}StartsTheShort",
    "0.5": f"{_OURS}StartsTheShort:in_debt=0.5",
    "0.8": f"{_OURS}StartsTheShort:in_debt=0.8",
    "1.0": f"{_OURS}StartsTheShort:in_debt=1.0",
    "0.5, after an answer": f"{_OURS}StartsTheShort:in_debt=0.5,after_stays=1.0",
    "`sjf:drop=infeasible`": "sjf:drop=infeasible",
}


def main() -> None:
    """Play all policies on all traffics, and print a table of the requests in time."""
    rows: list[list[object]] = []
    with progress_bar() as progress:
        task = progress.add_task("traffics", total=len(TRAFFICS) * len(POLICIES))
        for traffic in TRAFFICS:
            rows.append([traffic])
            for spec in POLICIES.values():
                rows[-1].append(traffic.num_good(spec))
                progress.advance(task)
    console.print(table(["traffic", *POLICIES], rows, num_texts=1), soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
