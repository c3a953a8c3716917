"""The results as committed CSV files, one for each study, and a file with their provenance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from experiments.command import provenance

HERE = Path(__file__).parent / "results"
_MADE = "provenance"


def path_of(name: str, folder: Path = HERE) -> Path:
    return folder / f"{name}.csv"


def read(name: str, folder: Path = HERE) -> pd.DataFrame:
    """Return the rows of a study.  Raises FileNotFoundError if it was not run."""
    path = path_of(name, folder)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run the study {name} again")
    return pd.read_csv(path, keep_default_na=False)


def write(
    name: str,
    rows: Iterable[Mapping[str, object]],
    facts: Mapping[str, object],
    folder: Path,
    experiment: str,
) -> None:
    """Write the rows of a study, and its line in the file of provenance."""
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(list(rows)).to_csv(path_of(name, folder), index=False, float_format="%.6g")
    made = pd.DataFrame([{"study": name, **facts, **provenance(experiment)}])
    if path_of(_MADE, folder).exists():
        before = read(_MADE, folder)
        made = pd.concat([before[before["study"] != name], made])
    made.sort_values("study").to_csv(path_of(_MADE, folder), index=False)


def who_made(name: str, folder: Path = HERE) -> pd.Series:
    made = read(_MADE, folder)
    return made[made["study"] == name].iloc[0]
