"""Is it worth it to prefill and decode on different replicas?  Four H100, shared in four ways."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import product
from pathlib import Path

import pandas as pd

from experiments.fleet.playing import play_cases
from experiments.fleet.questions import H100, Question
from experiments.fleet.tables import interval
from experiments.markdown import table
from slosched.core import SLO, DeadlineRule
from slosched.evaluate.capacity.outcomes import Outcomes
from slosched.fleet.setup import FleetSetup
from slosched.fleet.split import SplitConfig
from slosched.fleet.split_setup import SplitSetup
from slosched.fleet.transfer import KVTransfer
from slosched.perfmodel import kv_bytes_per_token, load_model
from slosched.policy.spec import make_policy
from slosched.workload import Tiers

RESULTS = Path(__file__).with_name("pools.csv")
PAGE = Path(__file__).with_name("pools.md")
POLICIES = ("vllm_v1", "goodput")
LAYOUTS = ("co-located", "1 + 3", "2 + 2", "3 + 1")
"""Replicas of the prefill pool + replicas of the decode pool."""
_BYTES_PER_S = 50e9
_NUM_WINDOWS, _NUM_REQUESTS = 4, 1500
_CONV, _CODE = "azure_conv_2023.csv", "azure_code_2023.csv"


def _question(name: str, trace: str, slo: SLO, rate: float) -> Question:
    return Question(name, trace, Tiers((slo,), (1.0,)), (rate,), _NUM_REQUESTS, _NUM_WINDOWS)


QUESTIONS = (
    _question("conversations, 1 s and 50 ms", _CONV, SLO(1.0, 0.05), 84.0),
    _question("conversations, 1 s and 15 ms", _CONV, SLO(1.0, 0.015), 60.0),
    _question("conversations, 250 ms and 50 ms", _CONV, SLO(0.25, 0.05), 84.0),
    _question("code, 1 s and 20 ms", _CODE, SLO(1.0, 0.02), 30.0),
)


def play() -> None:
    """Play what pools.csv does not have, and write it there."""
    key = ["question", "policy", "layout", "window"]
    kept = pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=key)
    known = set(kept[key].itertuples(index=False, name=None))
    cases = [
        (question, *case)
        for question in QUESTIONS
        for case in product(POLICIES, LAYOUTS, range(_NUM_WINDOWS))
        if (question.name, *case) not in known
    ]
    play_cases(cases, _row, kept, RESULTS)


def page() -> str:
    """Return the tables of pools.csv: shares in time, and what the best pools gain."""
    results = pd.read_csv(RESULTS)
    parts = [
        f"# {__doc__}",
        "Made by `python -m experiments.fleet pools`.  Each figure is the "
        "share of requests in time, the mean of the windows of the trace with its 95 % "
        "interval.  Gains are paired: both sides played the same windows.",
    ]
    for question in QUESTIONS:
        found = results[results["question"] == question.name]
        rows = [(f"`{policy}`", *_cells(found[found["policy"] == policy])) for policy in POLICIES]
        heads = ["policy", *LAYOUTS, "best pools over co-located"]
        parts.append(
            f"## {question.name}, {question.rates[0]:g} requests/s\n\n{table(heads, rows, 1)}"
        )
    return "\n\n".join(parts) + "\n"


def _cells(found: pd.DataFrame) -> list[str]:
    wide = found.pivot_table(index="window", columns="layout", values="in_time")
    means = {layout: interval(wide[layout].to_numpy(dtype=float)) for layout in LAYOUTS}
    best = max(LAYOUTS[1:], key=lambda layout: means[layout][0])
    gain = (wide[best] - wide[LAYOUTS[0]]).to_numpy(dtype=float)
    mean, half = interval(gain)
    cells = [f"{100 * mean:.1f} ± {100 * half:.1f} %" for mean, half in means.values()]
    return [*cells, f"{best}: {100 * mean:+.1f} ± {100 * half:.1f} points"]


def _row(question: Question, policy: str, layout: str, window: int) -> Mapping[Hashable, object]:
    trace = question.traffic(window, question.rates[0])
    requests = _fleet(question, layout).simulate(trace, make_policy(policy), seed=window)
    share = Outcomes.of(requests, DeadlineRule.MEAN_TPOT).attainment
    return {
        "question": question.name,
        "policy": policy,
        "layout": layout,
        "window": window,
        "in_time": round(share, 5),
    }


def _fleet(question: Question, layout: str) -> FleetSetup | SplitSetup:
    """Return the four replicas, all behind `least_requests`."""
    fleet = question.fleet("least_requests")
    if layout == LAYOUTS[0]:
        return fleet
    model = load_model(H100)
    token_bytes = kv_bytes_per_token(model)
    assert token_bytes is not None
    config = SplitConfig(int(layout.partition(" ")[0]), KVTransfer(token_bytes, _BYTES_PER_S))
    return SplitSetup(fleet.replicas, fleet.model_names, fleet.router, config)
