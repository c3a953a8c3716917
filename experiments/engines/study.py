"""The parts of a study: its replays as rows of numbers, and ratios of cases with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from experiments.arena.scenarios import Recorded
from slosched.core import Request
from slosched.metrics import StepRow
from slosched.perfmodel import FittedModel, load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace

LEVEL = 0.95
_ABOUT = 0.01
BLOCK_SIZE = 16
GAP_SHARES = (0.5, 0.9, 0.99, 0.999, 0.9999, 1.0)
"""Shares of the gaps between tokens; a column holds the gap that this share does not exceed."""
CONV, CODE, MOONCAKE = (
    Recorded("azure_conv_2023.csv"),
    Recorded("azure_code_2023.csv"),
    Recorded("mooncake_conversation.jsonl"),
)


@dataclass(frozen=True)
class Scale:
    """The amount of simulation: parts of each trace and requests in each; some studies adapt it."""

    num_windows: int = 6
    window_requests: int = 200


class Case(NamedTuple):
    """One replay: its place in the figures, and its inputs."""

    at: Mapping[str, object]
    """The columns by which the study distinguishes its cases."""
    trace: Trace
    model: FittedModel
    policy: str
    config: SimulationConfig


class Ratio(NamedTuple):
    """A ratio of two cases over the same windows: geometric mean, 95 % interval by Student's t."""

    mean: float
    low: float
    high: float

    @property
    def is_above_one(self) -> bool:
        return self.low > 1

    @property
    def is_below_one(self) -> bool:
        return self.high < 1

    @property
    def is_one(self) -> bool:
        """Tell whether the whole interval is within a hundredth of 1."""
        return abs(self.low - 1) < _ABOUT and abs(self.high - 1) < _ABOUT

    def __str__(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


class Finding(NamedTuple):
    """A sentence about the numbers, and whether it agrees with the study's statement."""

    text: str
    agrees: bool


@dataclass(frozen=True)
class Study:
    """A known behaviour of an engine, and how it is reproduced."""

    name: str
    title: str
    statement: str
    source: str
    setup: str
    cases: Callable[[Scale], Iterator[Case]]
    findings: Callable[[pd.DataFrame], Iterator[Finding]]
    figure: Callable[[pd.DataFrame], Figure]
    why: Callable[[pd.DataFrame], str] | None = None
    """An explanation, made from the numbers, of results that do not agree with the statement."""
    more: Callable[[Sequence[Request], Sequence[StepRow]], Mapping[str, float]] | None = None
    """Returns further columns for the requests and steps of a replay."""

    def measure(self, scale: Scale) -> Iterator[dict[str, object]]:
        """Yield a row for each replay."""
        for case in self.cases(scale):
            yield {**case.at, **self.played(case)}

    def played(self, case: Case) -> dict[str, float]:
        """Simulate a case and return its row, without the columns of its place."""
        requests, steps = play(case)
        more = self.more(requests, steps) if self.more else {}
        return {**summed_up(requests, steps), **more}


def play(case: Case) -> tuple[list[Request], list[StepRow]]:
    """Simulate a case and return its requests and steps."""
    steps: list[StepRow] = []
    requests = simulate(
        case.trace,
        make_policy(case.policy),
        case.model,
        case.config,
        on_row=lambda row, _: steps.append(row),
    )
    return requests, steps


def summed_up(requests: Sequence[Request], steps: Sequence[StepRow]) -> dict[str, float]:
    """Return the row of a replay; latencies (s) are of requests that emitted tokens."""
    done = [r for r in requests if r.token_times_s]
    first_s = np.array([r.token_times_s[0] - r.arrival_s for r in done])
    gaps_s = np.concatenate([np.diff(r.token_times_s) for r in done])
    ends_s = max(r.token_times_s[-1] for r in done)
    prompts = sum(r.num_prompt_tokens for r in done)
    return {
        "num_requests": len(requests),
        "num_served": len(done),
        "tokens_per_s": sum(r.num_output_tokens for r in done) / ends_s,
        "ttft_mean_s": float(first_s.mean()),
        "ttft_p50_s": float(np.quantile(first_s, 0.5)),
        "ttft_p99_s": float(np.quantile(first_s, 0.99)),
        **{gap_column(q): float(np.quantile(gaps_s, q)) for q in GAP_SHARES},
        "cached": sum(r.num_cached_tokens for r in done) / prompts,
        "num_preemptions": sum(r.num_preemptions for r in requests),
        "mean_step_s": float(np.mean([s.duration_s for s in steps])),
        "mean_running": _over_time([s.num_running for s in steps], steps),
        "max_waiting": max(s.num_waiting for s in steps),
    }


def gap_column(share: float) -> str:
    return f"gap_{100 * share:g}_s"


def windows(source: Recorded, size: int, number: int, rate: float) -> Iterator[tuple[int, Trace]]:
    """Yield the first parts of a trace with their numbers, each scaled to `rate` requests/s."""
    for i, trace in enumerate(source.windows(size, range(number))):
        yield i, trace.scaled_to(rate)


def device(name: str) -> tuple[FittedModel, int]:
    """Return a device's latency model, and the KV blocks that fit besides the weights."""
    model = load_model(name)
    return model, int(model.provenance["kv_capacity_tokens"]) // BLOCK_SIZE


def ratio(
    frame: pd.DataFrame, column: str, of: Mapping[str, object], to: Mapping[str, object]
) -> Ratio:
    """Return the ratio of one case's `column` to another's, paired by window.

    Rows that differ in a further column are paired in their order.  Raises ValueError unless both
    cases have the same number of replays, at least 2.
    """
    upper, lower = (_of_case(frame, case)[column].to_numpy(float) for case in (of, to))
    if len(upper) != len(lower) or len(upper) < 2:
        raise ValueError(f"{dict(of)} and {dict(to)} have {len(upper)} and {len(lower)} replays")
    logs = np.log(upper / lower)
    mean = float(logs.mean())
    reach = float(stats.t.ppf((1 + LEVEL) / 2, len(logs) - 1) * stats.sem(logs))
    return Ratio(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))


def over_windows(frame: pd.DataFrame, by: Sequence[str], column: str) -> pd.DataFrame:
    """Return the median, least and largest value over the windows for each value of `by`."""
    grouped = frame.groupby(list(by), sort=False)[column]
    return grouped.agg(["median", "min", "max"]).reset_index()


def _of_case(frame: pd.DataFrame, case: Mapping[str, object]) -> pd.DataFrame:
    chosen = np.logical_and.reduce([frame[name] == value for name, value in case.items()])
    return frame[chosen].sort_values("window", kind="stable")


def _over_time(values: Sequence[float], steps: Sequence[StepRow]) -> float:
    return float(np.average(values, weights=[s.duration_s for s in steps]))
