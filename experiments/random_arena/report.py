"""The page docs/random_arena.md; all its numbers are made from the results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean

from experiments.arena.figures import save
from experiments.markdown import table
from experiments.random_arena import results
from experiments.random_arena.cells import NUM_WINDOWS, PROMISED_TIMES, Cell
from experiments.random_arena.contenders import FLAGSHIP, RIVALS
from experiments.random_arena.figures import MOST_RATIO, clipped, distribution, ratios
from experiments.random_arena.play import HIGHEST, LOWEST, OVERLOAD, REFERENCE_TARGET, Effort
from experiments.random_arena.results import Row
from experiments.random_arena.workloads import PROMISED
from slosched.evaluate.capacity.results import Flag

PAGE = Path(__file__).parents[2] / "docs" / "random_arena.md"
DESIGN_SEEDS, FORMER_SEEDS, REPORT_SEED = (1, 2), (3, 4, 5, 6, 7, 8, 9, 10, 11), 12
"""Cells of the first seeds may be looked at while policies are changed, those of the last not.
The former seeds were reported first, each before policies were changed by it."""
_LAST_SHORT_SEED = 7
"""Cells of later seeds have windows that last longer than their promises."""
_LAST_BRIEF_SEED = 11
"""Cells of later seeds have overloads of several windows, whose last does not count."""
METRICS = ("capacity 99%", "capacity 90%", f"overload {OVERLOAD:g}x")
_GROUPS = [group.value for group in RIVALS]


def write(page: Path = PAGE) -> None:
    """Write the page, and its figure into a folder with the same name."""
    rows = results.read()
    if not rows:
        raise FileNotFoundError(
            "no cell has been played yet: python -m experiments.arena random --cells 2"
        )
    drawn = distribution(_of_seed(rows, REPORT_SEED), METRICS, _GROUPS)
    if drawn is not None:
        save(drawn, page.with_suffix("") / "ratios.svg")
    page.write_text(text(rows, has_figure=drawn is not None), encoding="utf-8")


def text(rows: Sequence[Row], *, has_figure: bool) -> str:
    """Return the page in Markdown."""
    parts = [_head()]
    reported = _of_seed(rows, REPORT_SEED)
    parts += [f"## Cells of seed {REPORT_SEED}", *_results(reported)]
    if has_figure:
        parts.append("![Ratios to the best of each class](random_arena/ratios.svg)")
    parts += ["### Cell by cell", _table(reported), f"### Where `{FLAGSHIP}` is behind"]
    parts.append(_behind(reported))
    for seed in reversed((*DESIGN_SEEDS, *FORMER_SEEDS)):
        if designed := _of_seed(rows, seed):
            parts += [f"## Cells of seed {seed}", *_results(designed), _table(designed)]
        if designed and seed in FORMER_SEEDS:
            parts += [f"### Where `{FLAGSHIP}` was behind", _behind(designed)]
    parts += ["## How it was made", _provenance(rows)]
    return "\n\n".join(parts) + "\n"


def line(row: Row) -> str:
    """Return what a cell came to in a line."""
    what = f"{row['name']}: {Cell(**row['cell'])}: "
    if "void" in row:
        return f"{what}{row['void']}"
    found = [f"{r['metric']} {r['class']} {r['ratio']:.2f}" for r in row["ratios"]]
    return what + ", ".join(found) + f" ({row['cpu_s']:.0f} s)"


def _head() -> str:
    effort = Effort()
    promises = "\n".join(f"- **{name}**: {what}." for name, what in PROMISED.items())
    return f"""# The arena of random cells

<!-- Made by `python -m experiments.random_arena report`; edit its report.py instead. -->

In [the arena](arena.md) the scenarios were chosen, and `{FLAGSHIP}` was made while they were \
looked at. Here each cell is drawn from a seed: device and model (all bundled ones on GPUs, dense \
and mixtures of experts), trace and window, promise, deadline rule, size of the KV cache, tail of \
the outputs, prefix cache and error of the latency model. Policies were \
changed after cells of the seeds {" and ".join(map(str, DESIGN_SEEDS))} had been looked at. Those \
of seeds {FORMER_SEEDS[0]} to {FORMER_SEEDS[-1]} were reported first. Their results are those of \
`{FLAGSHIP}` as it was then; after each [it was changed](../experiments/random_arena/README.md) \
where it was behind. Cells of seed {REPORT_SEED} were first played for this page.

In each cell every contender may try {effort.num_trials} settings on windows that do not judge, at \
a rate at which the best of three reference policies serves {REFERENCE_TARGET:.0%} in time. Ours \
and the best {effort.num_finalists} of each class go on to {NUM_WINDOWS} windows of \
{effort.window_requests} requests, or of as many as make it last for {PROMISED_TIMES:g} times the \
mean time that they may take (TTFT, and TPOT for each token) at that rate, up to \
{effort.most_window_requests:,}; where requests are long, of half or a quarter of both. \
There the search of `slosched capacity` finds capacities at 99 % and 90 %, between \
1/{1 / LOWEST:g} of that rate and {HIGHEST:g} times it. Then all are played at {OVERLOAD:g} \
times the best capacity at 90 %, where the windows come one after the other, each of them first \
once; the last one of a replay does not count. Ratios are to the best of a class in that cell, \
chosen in hindsight. They are paired by window, with 95 % intervals from resampled windows and \
blocks. The windows are short: intervals are wide, and a queue that grows for minutes is not seen.

**In cells of the seeds {DESIGN_SEEDS[0]} to {_LAST_BRIEF_SEED} overloads were brief**, one window \
each, and its end counted. That favoured who serves short prompts first, since the long ones are \
left to the end, when nobody comes any more \
([figures](../experiments/goodput/README.md#findings)).

**Cells of the seeds {DESIGN_SEEDS[0]} to {_LAST_SHORT_SEED} were played before windows were made \
to last.** Where a device is fast or answers are long, all of their \
{effort.window_requests} requests could come at once, within their promise, so that there was \
hardly a limit to the rate, and whoever gave up the first requests of a burst, which do not count, \
looked better, or `{FLAGSHIP}` did. In 8.2, capacities at 90 % were 81 to 297/s on such windows, \
and are 26 to 30/s. Ratios of those seeds far from 1 are to be read with that in mind.

Requests that no idle device could serve in time do not count, but they are served, and in the \
way. The class "with dropping" has `fcfs`, `sarathi`, `edf` and `sjf`, each with rejection of \
requests that are late. The class "published" has `slidebatching`, `qoserve`, `slai`, `slo_aware` \
and vLLM's scheduler behind Mooncake's early rejection.

How to run it: [experiments/random_arena](../experiments/random_arena/README.md). The promises, \
as TTFT and TPOT:

{promises}"""


def _results(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        yield "No cell has been played yet."
        return
    void = [row["name"] for row in rows if "void" in row]
    yield (
        f"{len(rows)} cells have been played, of which {len(void)} say nothing"
        + (f" ({', '.join(void)}: nobody serves enough in time at any rate). " if void else ". ")
        + 'A ratio is "surely" below or above 1 if its whole interval is, which one in twenty is '
        + "by chance where two are equally good. Ratios are taken as at "
        f"most {MOST_RATIO:g} and at least 1/{MOST_RATIO:g}. Where only one of the two reaches the "
        "target at any rate, there is no ratio."
    )
    if warning := _flagged(rows):
        yield warning
    heads = ["metric", "best", "cells", "geometric mean", "worst", "in cell"]
    heads += [
        "surely below 1",
        "surely above 1",
        f"only {FLAGSHIP} reaches",
        "only the best reaches",
    ]
    yield table(heads, [_summary(rows, m, g) for m in METRICS for g in _GROUPS], 2)


def _flagged(rows: Sequence[Row]) -> str:
    """Return how many capacities are to be read with care; empty if there is none."""
    flags = [one["flags"] for row in rows for one in row.get("capacity", [])]
    found = [each for each in flags if Flag.UNREACHABLE not in each]
    num_short, num_growing = (
        sum(flag in each for each in found) for flag in (Flag.SHORT, Flag.QUEUE_GROWS)
    )
    if not num_short + num_growing:
        return ""
    return (
        f"Of the {len(found)} capacities that were found in these cells, {num_short} are of "
        f"replays that are half over before the device has warmed up, and at {num_growing} the "
        "queue still grew: longer windows would give others."
    )


def _summary(rows: Sequence[Row], metric: str, group: str) -> list[object]:
    every = ratios(rows, metric, group)
    found = [ratio for ratio in every if not math.isnan(ratio["ratio"])]
    worst = min(found, key=lambda ratio: ratio["ratio"], default=None)
    values = [clipped(ratio["ratio"]) for ratio in found]
    return [
        metric,
        group,
        len(found),
        f"{geometric_mean(values):.2f}" if values else "",
        f"{worst['ratio']:.2f}" if worst else "",
        worst["name"] if worst else "",
        sum(ratio["high"] < 1 for ratio in found),
        sum(ratio["low"] > 1 for ratio in found),
        sum(ratio["of_ours"] > 0 == ratio["of_best"] for ratio in every),
        sum(ratio["of_best"] > 0 == ratio["of_ours"] for ratio in every),
    ]


def _table(rows: Sequence[Row]) -> str:
    """Return a line for each cell, in which a star marks ratios that are surely not 1."""
    heads = ["cell", "what"]
    heads += [f"{metric}, {group}" for metric in METRICS for group in _GROUPS]
    lines = []
    for row in rows:
        cells = [_ratio_text(ratios([row], m, g)) for m in METRICS for g in _GROUPS]
        lines.append([row["name"], str(Cell(**row["cell"])), *cells])
    return table(heads, lines, 2)


def _ratio_text(found: Sequence[Row]) -> str:
    if not found:
        return ""
    (one,) = found
    if math.isnan(one["ratio"]):
        if one["of_ours"] and one["of_best"]:
            return "no limit found"
        return "only ours" if one["of_ours"] else "only the other" if one["of_best"] else "neither"
    return f"{one['ratio']:.2f}" + "*" * (not one["low"] <= 1 <= one["high"])


def _behind(rows: Sequence[Row]) -> str:
    """Return a line for each ratio below 1, with a star where it is surely below."""
    lines = []
    for metric in METRICS:
        for group in _GROUPS:
            for one in ratios(rows, metric, group):
                only_other = one["of_best"] > 0 == one["of_ours"]
                if only_other or one["ratio"] < 1:
                    interval = "" if only_other else f"{one['low']:.2f} to {one['high']:.2f}"
                    ours, best = f"{one['of_ours']:.3g}", f"`{one['best']}`: {one['of_best']:.3g}"
                    lines.append([one["name"], metric, ours, best, _ratio_text([one]), interval])
    if not lines:
        return "In no cell."
    heads = ["cell", "metric", f"`{FLAGSHIP}`", "best of the class", "ratio", "interval"]
    return table(heads, lines, 2)


def _provenance(rows: Sequence[Row]) -> str:
    lines = []
    for digest in dict.fromkeys(row["code_digest"] for row in rows):
        same = [row for row in rows if row["code_digest"] == digest]
        seconds = sum(row["cpu_s"] for row in same)
        sources = sorted({row["source"] for row in same})
        names = ", ".join(row["name"] for row in same)
        lines.append(
            f"{len(same)} cells ({names}) by code {digest} ({same[0]['git_hash'][:12]}), with "
            f"`{same[-1]['command']}` on {same[-1]['machine']}, until {same[-1]['made']}, in "
            f"{seconds / len(same):.0f} s of a core each. Requests: {', '.join(sources)}."
        )
    return "\n\n".join(lines)


def _of_seed(rows: Sequence[Row], seed: int) -> list[Row]:
    return [row for row in rows if row["cell"]["seed"] == seed]
