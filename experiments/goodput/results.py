"""What the ideas gave, as a CSV file, and who made it: all that the page is made of."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.command import provenance as who_made
from experiments.goodput.ideas import Idea
from experiments.goodput.points import Point

HERE = Path(__file__).parent
RESULTS, PROVENANCE = HERE / "results.csv", HERE / "provenance.csv"


def play(idea: Idea, point: Point, window: int) -> dict[str, object]:
    """One row of the results."""
    with idea.in_place():
        found = point.play(idea.policy(), window)
    return {"idea": idea.name, "point": point.name, "window": window, **found}


def provenance(minutes: float) -> pd.DataFrame:
    facts = who_made("goodput") | {
        "minutes": round(minutes, 1),
    }
    return pd.DataFrame([facts])


def read(path: Path) -> pd.DataFrame:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: python -m experiments.goodput run")
    return pd.read_csv(path)


def write(path: Path, table: pd.DataFrame) -> None:
    table.to_csv(path, index=False, float_format="%.6g")
