"""Results as CSV files, with who made them: committed, and all that the page is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.command import provenance as who_made

HERE = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Results:
    """`rates` has a row a workload and policy, `losses` one a disturbance besides."""

    rates: pd.DataFrame
    losses: pd.DataFrame
    provenance: pd.DataFrame
    """One row."""

    @classmethod
    def read(cls, folder: Path = HERE) -> Results:
        return cls(*(_read(folder / f"{name}.csv") for name in cls.__annotations__))

    def write(self, folder: Path = HERE) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in vars(self).items():
            table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")


def provenance(num_windows: int, window_requests: int, minutes: float) -> pd.DataFrame:
    """Which code made the results, where, when, by which command, and how much was simulated."""
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
