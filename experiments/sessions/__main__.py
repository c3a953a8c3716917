"""`python -m experiments.sessions`: which order of eviction keeps programs of agents on time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import product
from pathlib import Path

import pandas as pd

from experiments.command import make_app, start
from experiments.sessions.cells import CELLS, EVICTIONS, SEEDS, Cell, play
from experiments.sessions.tables import page
from slosched.cli.console import console, progress_bar

RESULTS = Path(__file__).with_name("results.csv")
PAGE = Path(__file__).with_name("results.md")
_KEY = ["policy", "kv_tokens", "rate", "late", "eviction", "seed"]

app = make_app(__doc__)


@app.command()
def run() -> None:
    """Play what results.csv does not have, and make results.md.

    All of it takes about half an hour of a core.

    Example: `python -m experiments.sessions run`.
    """
    kept = _read() if RESULTS.exists() else pd.DataFrame(columns=_KEY)
    known = set(kept[_KEY].itertuples(index=False, name=None))
    cases = [
        (cell, eviction, seed)
        for cell, seed, eviction in product(CELLS, SEEDS, EVICTIONS)
        if (*_named(cell), str(eviction), seed) not in known
    ]
    rows: list[Mapping[Hashable, object]] = [*kept.to_dict("records")]
    with progress_bar() as progress:
        for case in progress.track(cases, description="replaying"):
            rows.append(play(*case))
            pd.DataFrame(rows).to_csv(RESULTS, index=False)
    report()


@app.command()
def report() -> None:
    """Make results.md of the committed results.

    Example: `python -m experiments.sessions report`.
    """
    PAGE.write_text(page(_read()), encoding="utf-8")
    console.print(f"wrote {PAGE}")


def _named(cell: Cell) -> tuple[str, int, float, str]:
    return cell.policy, cell.kv_tokens, cell.rate, str(cell.late)


def _read() -> pd.DataFrame:
    return pd.read_csv(RESULTS, dtype={"on_time": str})


if __name__ == "__main__":
    start(app)
