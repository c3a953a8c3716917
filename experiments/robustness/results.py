"""The results as committed CSV files, with their provenance; the page is made from them alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.command import provenance as who_made

HERE = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Results:
    """Tables: `rates` by workload and policy, `losses` by workload, policy and disturbance.

    `lasting` has the share of requests that any schedule can serve, by workload and cache.
    """

    rates: pd.DataFrame
    losses: pd.DataFrame
    lasting: pd.DataFrame
    provenance: pd.DataFrame
    """A table of one row."""

    @classmethod
    def read(cls, folder: Path = HERE) -> Results:
        return cls(*(_read(folder / f"{name}.csv") for name in cls.__annotations__))

    def write(self, folder: Path = HERE) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in vars(self).items():
            table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")


def provenance(num_windows: int, window_requests: int, minutes: float) -> pd.DataFrame:
    """Return the code, machine, date and command of the results, and how much was simulated."""
    facts = who_made("robustness") | {
        "num_windows": num_windows,
        "window_requests": window_requests,
        "minutes": round(minutes, 1),
    }
    return pd.DataFrame([facts])


def _read(path: Path) -> pd.DataFrame:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: make it with `make robustness`")
    return pd.read_csv(path, keep_default_na=False)
