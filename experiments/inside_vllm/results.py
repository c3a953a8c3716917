"""Rows in CSV files: committed, gone on with where a run stopped, and all that the page needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.inside_vllm.heats import Row

HERE = Path(__file__).parent / "results"
TUNING, RUNS, PREDICTIONS = "tuning", "runs", "predictions"
MAX_LATENESS_S = 0.05
"""In the device's time; beyond it the machine was too busy, and the heat tells nothing."""
_KEYS = ["setup", "rate", "window", "system"]


def read(name: str, folder: Path = HERE) -> pd.DataFrame:
    """No rows where nothing has been measured yet."""
    path = folder / f"{name}.csv"
    return (
        pd.read_csv(path, keep_default_na=False) if path.exists() else pd.DataFrame(columns=_KEYS)
    )


def keep(name: str, rows: Sequence[Row], folder: Path = HERE) -> None:
    """Add `rows`; those that were there under the same setup, rate, window and system go."""
    folder.mkdir(parents=True, exist_ok=True)
    known = [row for row in (read(name, folder), pd.DataFrame(rows)) if len(row)]
    table = pd.concat(known).drop_duplicates(_KEYS, keep="last").sort_values(_KEYS)
    table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")


def has(name: str, setup: str, rate: float, window: int, folder: Path = HERE) -> bool:
    """Whether this has been measured, of whatever systems, on a machine that kept up."""
    rows = valid(read(name, folder))
    found = (rows["setup"] == setup) & (rows["rate"] == rate) & (rows["window"] == window)
    return bool(found.any())


def valid(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of heats in which the client itself sent every request nearly when it was due."""
    if rows.empty:
        return rows
    late_s = rows["max_lateness_s"] / rows["slowdown"]
    worst_s = late_s.groupby([rows[key] for key in _KEYS[:3]]).transform("max")
    return rows[worst_s <= MAX_LATENESS_S]


def best_budget(setup: str, folder: Path = HERE) -> int:
    """The budget with which vLLM's own scheduler served most in time; ValueError if untuned."""
    rows = valid(read(TUNING, folder))
    rows = rows[rows["setup"] == setup]
    if rows.empty:
        raise ValueError(
            f"vLLM's budget is not tuned for {setup}: `python -m experiments.inside_vllm tune "
            f"{setup}` does it"
        )
    means = rows.groupby("max_num_batched_tokens", as_index=False)["attainment"].mean()
    return int(means.loc[means["attainment"].argmax(), "max_num_batched_tokens"])
