"""The results of the study, and the page that is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from experiments.long_steps.cells import DENSE, MIXTURES, NUM_REQUESTS, OURS, POLICIES
from experiments.markdown import table
from experiments.paired import against, blocks_of
from experiments.portfolio.cells import Cell

_FOLDER = Path(__file__).parent
PAGE = _FOLDER / "README.md"
RESULTS = _FOLDER / "results.csv"


def keep(rows: pd.DataFrame, made: Mapping[str, object]) -> None:
    """Write the results in place of those that there were."""
    facts = {name: str(made[name]) for name in ("code_digest", "command", "machine", "made")}
    columns = ["cell", "window", "policy", "num_judged", "blocks"]
    rows[columns].assign(**facts).to_csv(RESULTS, index=False)


def write() -> None:
    """Write the page."""
    PAGE.write_text(text())


def text() -> str:
    """Return the page that the results make."""
    results = pd.read_csv(RESULTS)
    made = results.iloc[0]
    specs = [(f"`{name}`", f"`{spec}`") for name, spec in POLICIES.items()]
    parts = [
        "# Steps longer than a TPOT",
        f"Made by `python -m experiments.long_steps report`. {_ABOUT}",
        table(["name", "policy"], specs),
        "## Mixtures of experts",
        _attained(results, MIXTURES),
        "## Dense models",
        _attained(results, DENSE),
        f"Played by code {made['code_digest']} with `{made['command']}` on {made['machine']}, "
        f"{made['made']}.",
    ]
    return "\n\n".join(parts) + "\n"


_ABOUT = f"""On a device on which the first tokens of a chunk cost most of its time, \
[`goodput`](../../docs/policies/goodput.md) lets decodes get ahead and then runs a whole chunk in \
a step longer than a TPOT. This is what it gains. One simulated replica: 5 % noise on every step, \
latency model corrected online, 2,048 tokens and 256 requests a step. Each cell has windows of \
{NUM_REQUESTS} requests of Azure's trace of 2023, which were not looked at while the policy was \
made; the rates were not tuned to any policy's knee. The tables have the share of good requests in \
percent, of those that arrive in the last three quarters of a window.

"Over without" and "over the best other" are differences in points with the 95 % interval of \
Student's t over eight blocks of consecutive requests a window, paired. The best other is chosen \
in hindsight, for each cell. The others have the options that the arena's tuning chose most \
often, or a larger budget, which suits mixtures of experts."""


def _attained(results: pd.DataFrame, cells: Iterable[Cell]) -> str:
    others = [name for name in POLICIES if name not in OURS]
    rows = []
    for cell in cells:
        found = results[results["cell"] == cell.name]
        blocks = {name: 100 * blocks_of(found, name) for name in POLICIES}
        best = max(others, key=lambda name: float(blocks[name].mean()))
        rows.append(
            [
                cell.name,
                *(f"{blocks[name].mean():.1f}" for name in POLICIES),
                against(blocks["goodput"] - blocks["without"]),
                f"{against(blocks['goodput'] - blocks[best])} (`{best}`)",
            ]
        )
    heads = ["cell", *(f"`{name}`" for name in POLICIES), "over without", "over the best other"]
    return table(heads, rows, 1)
