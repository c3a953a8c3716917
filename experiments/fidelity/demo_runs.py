"""Runs of `slosched demo`: our own engine on a CPU, beside the simulator."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.fidelity.stages import MEASURED

RUNS = MEASURED.parent / "demo.csv"
"""A row for each run and policy: `agreement.csv` of the demo, and where and when it ran."""
_KEY = ["run", "policy"]


def collect(agreement: Path, run: str, machine: str, runs: Path = RUNS) -> None:
    """Add the `agreement.csv` of a demo to the runs, in place of one with the same name.

    Raises FileNotFoundError if there is no such file.
    """
    new = pd.read_csv(agreement).assign(run=run, machine=machine)
    if runs.exists():
        before = pd.read_csv(runs)
        new = pd.concat([before[before["run"] != run], new])
    columns = ["run", "machine", *new.columns.difference(["run", "machine"], sort=False)]
    new[columns].sort_values(_KEY).to_csv(runs, index=False, float_format="%.4f")


def read(path: Path = RUNS) -> pd.DataFrame:
    """Return the runs, with what was simulated less what was live, in points."""
    runs = pd.read_csv(path)
    return runs.assign(points=100 * (runs["simulated_mean"] - runs["live"]))
