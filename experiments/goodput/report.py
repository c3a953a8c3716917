"""The page README.md: two handwritten parts, and tables made from the results."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pandas as pd

from experiments.goodput import results
from experiments.goodput.ideas import BASE, FAIRNESS, IDEAS
from experiments.markdown import table

PAGE = results.HERE / "README.md"
CLEAR_POINTS = 0.5
"""Points that a difference must reach in every window, with one sign, to be printed bold."""


def text() -> str:
    """Return the page in Markdown."""
    frame = results.read(results.RESULTS)
    made = results.read(results.PROVENANCE).to_dict("records")
    parts = [
        "# goodput: what was tried",
        "<!-- Made by `python -m experiments.goodput report`; edit introduction.md or findings.md, "
        "not this file. -->",
        _written("introduction"),
        "## Attainment",
        _attainment(frame),
        "## Long prompts",
        _fairness(frame),
        "## Findings",
        _written("findings"),
        "## Where this comes from",
        "\n".join(map(_who_made, made)),
        "Every replay is a row of [results.csv](results.csv); later replays replaced earlier ones "
        "of the same idea and window.",
    ]
    return "\n\n".join(parts) + "\n"


def _who_made(run: dict[Hashable, Any]) -> str:
    return (
        f"- `{run['command']}`, {run['num_replays']} replays, {run['minutes']:g} minutes; commit "
        f"{run['git_hash']}, code {run['code_digest']}; {run['machine']}; {run['made']}."
    )


def _written(name: str) -> str:
    return (results.HERE / f"{name}.md").read_text(encoding="utf-8").strip()


def _attainment(frame: pd.DataFrame) -> str:
    by_window = frame.pivot(index="idea", columns=["point", "window"], values="attainment") * 100
    base = by_window.loc[BASE.name]
    points = list(dict.fromkeys(frame["point"]))
    what = {idea.name: idea.what for idea in IDEAS}
    rows = [
        [f"**{BASE.name}**", BASE.what, *(_of_windows(base[point]) for point in points), ""],
    ]
    for name in dict.fromkeys(frame["idea"]):
        if name != BASE.name:
            gains = by_window.loc[name] - base
            cells = [_gain(gains[point]) for point in points]
            mean = gains.groupby(level="point").mean().mean()
            rows.append([str(name), what.get(str(name), ""), *cells, f"{mean:+.1f}"])
    return table(["idea", "what is different", *points, "mean"], rows, num_texts=2)


def _of_windows(percent: pd.Series) -> str:
    return f"{percent.mean():.1f} ({' '.join(f'{p:.1f}' for p in percent)})"


def _gain(points: pd.Series) -> str:
    is_clear = points.min() >= CLEAR_POINTS or points.max() <= -CLEAR_POINTS
    said = f"{points.mean():+.1f}"
    return f"**{said}**" if is_clear else said


def _fairness(frame: pd.DataFrame) -> str:
    kinds = {
        "attainment": "good requests",
        "good_prompt_tokens": "good prompt tokens",
        "longest_tenth": "good of the longest tenth",
    }
    names = [BASE.name, *(idea.name for idea in FAIRNESS)]
    mean = frame.groupby(["point", "idea"], sort=False)[list(kinds)].mean() * 100
    rows = []
    for point in dict.fromkeys(frame["point"]):
        for column, said in kinds.items():
            cells = [f"{mean.loc[(point, name), column]:.1f}" for name in names]
            rows.append([str(point) if column == "attainment" else "", said, *cells])
    return table(["point", "% of", *names], rows, num_texts=2)
