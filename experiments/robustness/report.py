"""The page docs/robustness.md; all its numbers and findings are made from the results."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.arena.figures import save
from experiments.markdown import table
from experiments.robustness.figures import loss_figure, short
from experiments.robustness.kinds import WARM_UP_SHARE, Kind, kinds
from experiments.robustness.results import Results
from slosched.simulator.disturbances import Disturbances

PAGE = Path(__file__).parents[2] / "docs" / "robustness.md"
FIGURES = PAGE.with_suffix("")
LEAST_POINTS = 1.0
"""The loss that makes a finding: surely more than this is a break, surely less is none."""

_KINDS = kinds(())
_WAYS = {
    "rejected_points": "it rejects more",
    "first_late_points": "first tokens are late",
    "tokens_late_points": "the tokens after the first are late",
}


def write(results: Results, page: Path = PAGE) -> None:
    """Write the page, and its figures into a folder with the same name."""
    for kind, losses in _by_kind(results.losses):
        save(loss_figure(kind, losses), page.with_suffix("") / f"{kind.name}.svg")
    page.write_text(text(results), encoding="utf-8")


def text(results: Results) -> str:
    """Return the page in Markdown."""
    parts = [_head(results), _rates(results.rates), _summary(results.losses)]
    for kind, losses in _by_kind(results.losses):
        parts.append(_section(kind, losses, _possible(kind, results)))
    return "\n\n".join([*parts, _foot(results.provenance)]) + "\n"


def _head(results: Results) -> str:
    made = results.provenance.iloc[0]
    num_counted = int(made["num_windows"]) * round(
        int(made["window_requests"]) * (1 - WARM_UP_SHARE)
    )
    return (
        "# Robustness: which policies break, and how\n\n"
        "<!-- Made by `make robustness`; edit experiments/robustness/report.py instead. -->\n\n"
        "Every policy is played at its own knee: the highest rate at which it serves nearly all "
        "requests in time, on a device that behaves as the policy assumes. Then one thing is "
        "disturbed, and the same requests are played again. A loss is in points of attainment: "
        "hundredths of the requests that are no longer served within their SLOs.\n\n"
        f"{int(made['num_windows'])} parts of each trace are played, with "
        f"{int(made['window_requests'])} requests each, of which the last "
        f"{_percent(1 - WARM_UP_SHARE)} count: one point is {num_counted / 100:.0f} requests. "
        "Intervals are 95 %, paired, over windows and blocks of consecutive requests "
        "(`slosched.evaluate.statistics`). The workloads are those of "
        "[the arena](../experiments/arena/scenarios.py), without its noise. Except in the first "
        "section, the policies' latency model is corrected online. Baselines reject requests that "
        "cannot be in time. How to run it: "
        "[experiments/robustness](../experiments/robustness/README.md)."
    )


def _rates(rates: pd.DataFrame) -> str:
    workloads = list(dict.fromkeys(rates["workload"]))
    policies = list(dict.fromkeys(rates["policy"]))
    by_place = rates.set_index(["workload", "policy"]).to_dict("index")
    rows = []
    for policy in policies:
        cells = []
        for workload in workloads:
            found = by_place[workload, policy]
            cells.append(f"{found['requests_per_s']:.3g} ({_percent(found['target'])})")
        rows.append([f"`{policy}`", *cells])
    return (
        "## The load\n\nThe table shows the requests/s of each policy, and the attainment that it "
        "reaches there undisturbed (in the search for the knee, which counts other requests).\n\n"
        + table(["policy", *workloads], rows, num_texts=1)
    )


def _summary(losses: pd.DataFrame) -> str:
    rows = []
    for policy, of_policy in losses.groupby("policy", sort=False):
        cells = [_worst(of_policy[of_policy["kind"] == kind.name]) for kind in _present(losses)]
        rows.append([f"`{short(str(policy))}`", *cells])
    heads = [kind.name for kind in _present(losses)]
    return (
        "## The worst of each kind\n\nThe table shows the largest loss in points over all "
        "strengths, variants and workloads. **Bold**: surely more than "
        f"{LEAST_POINTS:g} point.\n\n" + table(["policy", *heads], rows, num_texts=1)
    )


def _worst(losses: pd.DataFrame) -> str:
    worst = losses.sort_values("loss_points").iloc[-1]
    cell = f"{worst['loss_points']:.1f}"
    return f"**{cell}**" if worst["low_points"] > LEAST_POINTS else cell


def _section(kind: Kind, losses: pd.DataFrame, possible: str) -> str:
    figure = f"![{kind.title}: points lost]({FIGURES.name}/{kind.name}.svg)"
    parts = [f"## {kind.title}", _what(kind), "\n".join(_findings(kind, losses)), possible, figure]
    return "\n\n".join([*filter(None, parts), _details(kind, losses)])


def _possible(kind: Kind, results: Results) -> str:
    """Return what any schedule could serve with a smaller cache; nothing for other kinds."""
    if kind.name != "kv" or results.lasting.empty:
        return ""
    lines = [
        f"- **{row['workload']}, {kind.label(row['strength'])}**: {100 * row['share']:.1f} % "
        f"({100 * row['least_share']:.0f} to {100 * row['most_share']:.0f} %) at "
        f"{row['requests_per_s']:.3g}/s"
        for row in results.lasting.to_dict("records")
    ]
    policy = short(str(results.rates["policy"].iloc[0]))
    return (
        "If the windows came again and again without end, no schedule could serve more of their "
        "requests in time than this, even if it knew all arrivals and lengths "
        f"([L5](bounds.md#the-five-bounds), at the knee of `{policy}`; in brackets the windows "
        "with the least and the most):\n\n" + "\n".join(lines) + "\n\nA window that begins with an "
        "empty cache and ends leaves more possible than lasting load does."
    )


def _what(kind: Kind) -> str:
    if kind.name != "stall":
        return kind.what
    every_s = Disturbances().stall_every_s
    lost = _listed([f"{100 * s / (s + every_s):.1f} % ({kind.label(s)})" for s in kind.strengths])
    return f"{kind.what} It loses {lost} of its time."


def _findings(kind: Kind, losses: pd.DataFrame) -> Iterator[str]:
    """Yield a line for each workload and variant."""
    for (workload, variant), here in losses.groupby(["workload", "variant"], sort=False):
        where = f"{workload}, {variant}" if variant else str(workload)
        breaks, holds = [], []
        for policy, rows in here.groupby("policy", sort=False):
            worst = rows.sort_values("loss_points").iloc[-1]
            if worst["low_points"] > LEAST_POINTS:
                breaks.append((float(worst["loss_points"]), _break(kind, str(policy), worst)))
            elif (rows["high_points"] < LEAST_POINTS).all():
                holds.append(short(str(policy)))
        told = [line for _, line in sorted(breaks, key=lambda found: -found[0])]
        least = f"{LEAST_POINTS:g} point"
        broken = "; ".join(told) if told else f"no policy surely loses more than {least}"
        held = f"These surely lose less than {least}: {_listed(holds)}." if holds else ""
        yield f"- **{where}**: {broken}. {held}".rstrip()


def _break(kind: Kind, policy: str, worst: pd.Series) -> str:
    way = max(_WAYS, key=lambda column: float(worst[column]))
    return (
        f"{short(policy)} loses {worst['loss_points']:.1f} ({worst['low_points']:.1f} to "
        f"{worst['high_points']:.1f}) at {kind.label(float(worst['strength']))}, "
        f"mostly because {_WAYS[way]}"
    )


def _details(kind: Kind, losses: pd.DataFrame) -> str:
    """Return all losses of the kind, in a section that opens on a click."""
    parts = []
    for workload, here in losses.groupby("workload", sort=False):
        heads, rows = ["points lost"], []
        for policy, of_policy in here.groupby("policy", sort=False):
            found = of_policy.to_dict("records")
            heads[1:] = [f"{one['variant']} {kind.label(one['strength'])}".strip() for one in found]
            rows.append([f"`{short(str(policy))}`", *(_cell(one) for one in found)])
        parts.append(f"{workload}\n\n{table(heads, rows, num_texts=1)}")
    return _folded("All losses, with their intervals", "\n\n".join(parts))


def _cell(found: Mapping[Hashable, Any]) -> str:
    return f"{found['loss_points']:.1f} ({found['low_points']:.1f} to {found['high_points']:.1f})"


def _foot(provenance: pd.DataFrame) -> str:
    made = provenance.iloc[0]
    return (
        "## Provenance\n\n"
        f"`{made['command']}`, {made['minutes']:g} minutes; commit {made['git_hash']}, code "
        f"{made['code_digest']}; {made['machine']}; {made['made']}. The numbers are in "
        "[experiments/robustness/results](../experiments/robustness/results)."
    )


def _by_kind(losses: pd.DataFrame) -> Iterator[tuple[Kind, pd.DataFrame]]:
    for kind in _present(losses):
        yield kind, losses[losses["kind"] == kind.name]


def _present(losses: pd.DataFrame) -> list[Kind]:
    return [kind for kind in _KINDS if kind.name in set(losses["kind"])]


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{inside}\n\n</details>"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)
