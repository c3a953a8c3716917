"""The table of results, and the page that is made of it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.markdown import table
from experiments.paired import against, blocks_of
from experiments.portfolio import drawn_report
from experiments.portfolio.cells import CELLS, REPORT, SETTLING_S
from slosched.policy.portfolio.policy import default_candidates

_FOLDER = Path(__file__).parent
PAGE = _FOLDER / "README.md"
RESULTS = _FOLDER / "results.csv"
_PORTFOLIO = "portfolio"


def replace_cell(rows: pd.DataFrame) -> None:
    """Write the results of one cell, in place of those of the same cell and kind."""
    kept = read() if RESULTS.exists() else pd.DataFrame()
    if len(kept):
        same = (kept["cell"] == rows["cell"].iloc[0]) & (kept["kind"] == rows["kind"].iloc[0])
        kept = kept[~same]
    pd.concat([kept, rows]).to_csv(RESULTS, index=False)


def read() -> pd.DataFrame:
    """Return the results of all cells; raise FileNotFoundError if there are none."""
    if not RESULTS.exists():
        raise FileNotFoundError(
            f"{RESULTS} is missing: make it with `python -m experiments.portfolio run`"
        )
    return pd.read_csv(RESULTS)


def write() -> None:
    """Write the page."""
    results = read()
    results = results[results["kind"] == REPORT]
    steady = [name for name, cell in CELLS.items() if not cell.turns]
    turning = [name for name, cell in CELLS.items() if cell.turns]
    PAGE.write_text(
        "\n\n".join(
            [
                "# Is `portfolio` as good as the best of its candidates?",
                _ABOUT,
                "## Steady traffic",
                _attained(results, steady),
                "## Traffic or device that turns",
                f"Judged are the arrivals from {SETTLING_S:g} s after the turn on. The best "
                "candidate is the one that is best there, having served all of the window.",
                _attained(results, turning),
                drawn_report.text(),
                "## What it costs",
                _COST,
                _costs(results),
            ]
        )
        + "\n"
    )


_ABOUT = """Made by `python -m experiments.portfolio run`, cell by cell. One simulated replica: \
5 % noise on every step, latency model corrected online, KV cache of the device, 2,048 tokens and \
256 requests a step. The tables have the share of good requests in percent, of those that arrive \
in the last three quarters of a window. Requests are Azure's of 2023; the windows lie behind those \
on which the policy was designed. The candidates are those that `portfolio` had by default when a \
cell was played; a dash marks those that it did not have.

"Against the best" is the difference to the candidate that is best in hindsight, with the 95 % \
interval of Student's t over eight blocks of consecutive requests a window, paired. Rates are \
fixed: they were not tuned to any policy's knee. "Code" is the beginning of the digest of the code \
that was played."""
_COST = """Processor time of the replays that `portfolio` asks for, over the time on the simulated \
device's clock, on a machine that others used as well."""


def _attained(results: pd.DataFrame, names: list[str]) -> str:
    every = dict.fromkeys([*default_candidates(), *results["policy"]])
    candidates = [spec for spec in every if spec != _PORTFOLIO]
    rows = []
    for name in names:
        cell = results[results["cell"] == name]
        if not len(cell):
            continue
        played = set(cell["policy"])
        blocks = {spec: blocks_of(cell, spec) for spec in every if spec in played}
        means = {spec: 100 * float(each.mean()) for spec, each in blocks.items()}
        best = max((s for s in candidates if s in played), key=lambda spec: means[spec])
        rows.append(
            [
                name,
                *(f"{means[spec]:.1f}" if spec in played else "–" for spec in candidates),
                f"**{means[_PORTFOLIO]:.1f}**",
                against(100 * (blocks[_PORTFOLIO] - blocks[best])),
                cell["window"].nunique(),
                cell["code_digest"].iloc[0][:6],
            ]
        )
    heads = [
        "cell",
        *(f"`{spec}`" for spec in candidates),
        "`portfolio`",
        "against the best",
        "windows",
        "code",
    ]
    return table(heads, rows, 1)


def _costs(results: pd.DataFrame) -> str:
    rows = []
    for name in CELLS:
        cell = results[(results["cell"] == name) & (results["policy"] == _PORTFOLIO)]
        if len(cell):
            replays_s, device_s = cell["replays_cpu_s"].sum(), cell["device_s"].sum()
            rows.append(
                [
                    name,
                    f"{device_s:.0f}",
                    f"{replays_s:.1f}",
                    f"{100 * replays_s / device_s:.1f}",
                    int(cell["num_evaluations"].sum()),
                    int(cell["num_changes"].sum()),
                ]
            )
    heads = ["cell", "device s", "replays s", "% of a core", "evaluations", "changes"]
    return table(heads, rows, 1)
