"""The page docs/claims.md; all its numbers and verdicts are made from the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.arena.figures import save
from experiments.engines import results
from experiments.engines.report import anchor, section
from experiments.engines.study import Finding, Study
from experiments.markdown import table

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
RESULTS = Path(__file__).parent / "results"
_JUDGED = "judged_*.csv"

_HEAD = (
    "# Claims of 2026, tried\n\n"
    "<!-- Made by `python -m experiments.claims`; edit experiments/claims instead. -->\n\n"
    "Schedulers are proposed faster than they are compared. Each section takes one that "
    "people argue about, names its claim and its thread, and plays it in the simulator: the "
    "same requests and step times for all, with seeds of its own. Ratios are "
    "geometric means over the seeds with 95 % intervals (paired, Student's t); curves are "
    "medians, and bands the range over the seeds. A finding agrees with the claim if its whole "
    "interval does; otherwise it is marked, be it that the claim is wrong there or that the seeds "
    "do not tell. A claim is confirmed if all its findings agree with it, refuted if none does, "
    "and otherwise it is bounded: the findings say where it holds. A verdict is "
    "about these devices, loads and lengths, and each section says "
    "what it rests on. How to run it: [experiments/claims](../experiments/claims/README.md)."
)

_LEFT_OUT = (
    "## What could not be tried\n\n"
    "Two claims of 2026 have no policy here, since neither the text of their algorithms nor "
    "their code was to be found in public, beyond abstracts, announcements and a project "
    "page:\n\n"
    "- **SlidingServe** ([arXiv 2606.05933](https://arxiv.org/abs/2606.05933)): 9.7 to 30 % "
    "more goodput than QoServe. Chunks are chosen for two steps at once, and a knapsack "
    "selects the requests of a step. [qoserve](policies/qoserve.md) is here to compare with.\n"
    "- **Tail-aware scheduling** (UniBoost, ICML '26, [arXiv "
    "2606.18431](https://arxiv.org/abs/2606.18431)): a P99 to the last token 35 to 50 % below "
    "that of SRPT which knows all lengths. A parameter γ boosts priorities between shortest "
    "first and first come, first served; the boost's formula is not in what could be read."
)

_JUDGE = (
    "## Are they better for promises?\n\n"
    "The claims above are about latency and waste. `slosched judge` asks another question: "
    "how many requests keep their TTFT and TPOT, in four scenarios of the [arena](arena.md), "
    "at the rate at which the best plain policy keeps 90 % of the promises and at twice that "
    "rate ([how it judges](how-to/judge-a-policy.md)). The rival is `vllm_v1`. Each was "
    "judged by `slosched judge POLICY --against vllm_v1 --quick --time-limit 6m --jobs 1`, and "
    "`goodput`, for comparison, for 7 minutes. On the busy machine these sufficed for two of its "
    "scenarios."
)

_JUDGED_NOTE = (
    "In these scenarios the KV cache holds all that runs, so that the rules about victims change "
    "nothing. A step has at most 2,048 tokens, which is the cap of P-PAS, so "
    "that it changes nothing either. An interval without an upper end means that `vllm_v1` serves "
    "next to nothing in time there. None of the five is in the results of the arena yet."
)


def write(studies: Sequence[Study], folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Write the page of the studies that were run, and its figures into a folder of its name."""
    sections, rows = [], []
    for study in studies:
        if not results.path_of(study.name, folder).exists():
            continue
        frame = results.read(study.name, folder)
        findings = list(study.findings(frame))
        save(study.figure(frame), page.with_suffix("") / f"{study.name}.svg")
        verdict = verdict_of(findings)
        rows.append((f"[{study.title}](#{anchor(study.title)})", study.source, verdict))
        words = ("Claimed", "Tried", "Came out", verdict, "Not surely so")
        made = results.who_made(study.name, folder)
        sections.append(section(study, frame, findings, page, made, words))
    parts = [_HEAD, table(("claim", "where", "verdict"), rows), *sections]
    if judged := sorted(folder.glob(_JUDGED)):
        frame = pd.concat([pd.read_csv(path) for path in judged])
        parts += [_JUDGE, _verdicts(frame), _JUDGED_NOTE]
    parts.append(_LEFT_OUT)
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def verdict_of(findings: Sequence[Finding]) -> str:
    """Return confirmed, bounded or refuted, with the number of findings that agree."""
    num = sum(finding.agrees for finding in findings)
    if num == len(findings):
        return "confirmed"
    if not num:
        return "refuted"
    return f"bounded ({num} of {len(findings)} findings agree)"


def _verdicts(frame: pd.DataFrame) -> str:
    """Return a row for each policy and load: good requests over those of the rival."""
    scenarios = list(dict.fromkeys(frame["scenario"]))
    rows = []
    for (policy, load), here in frame.groupby(["policy", "load"], sort=False):
        by_scenario = here.set_index("scenario")
        cells = [
            _cell(by_scenario.loc[scenario]) if scenario in by_scenario.index else "not played"
            for scenario in scenarios
        ]
        rows.append((f"`{policy}`", "knee" if load == 1 else f"{load:g}x", *cells))
    return table(("policy", "load", *scenarios), rows)


def _cell(answer: pd.Series) -> str:
    ratio, low, high = (float(answer[name]) for name in ("ratio", "low", "high"))
    if math.isnan(ratio):
        return f"{answer['verdict']} (nobody serves any)"
    told, least, most = (_told(value) for value in (ratio, low, high))
    return f"{answer['verdict']}, {told} ({least} to {most})"


def _told(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.2f}"
