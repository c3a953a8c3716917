"""The results of the ideas and their provenance, as CSV files from which the page is made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.command import provenance as who_made
from experiments.goodput.ideas import IDEAS, Idea
from experiments.goodput.points import POINTS, Point

HERE = Path(__file__).parent
RESULTS, PROVENANCE = HERE / "results.csv", HERE / "provenance.csv"


def play(idea: Idea, point: Point, window: int) -> dict[str, object]:
    """Play one window and return its row of the results."""
    found = point.play(idea.policy(), window)
    return {"idea": idea.name, "point": point.name, "window": window, **found}


def of_points(names: Sequence[str]) -> pd.DataFrame:
    """Return the stored results of these points; no rows if `names` is empty."""
    if not names:
        return pd.DataFrame({"point": [], "idea": [], "window": []})
    rows = read(RESULTS)
    return rows[rows["point"].isin(names)]


def put(kept: pd.DataFrame, played: pd.DataFrame, minutes: float) -> None:
    """Write kept and played rows, sorted by point and idea, and add the run to the provenance."""
    if played.empty:
        return
    rows = pd.concat([kept, played]) if len(kept) else played
    places = pd.DataFrame(
        {
            "point": rows["point"].map({point.name: i for i, point in enumerate(POINTS)}),
            "idea": rows["idea"].map({idea.name: i for i, idea in enumerate(IDEAS)}),
            "window": rows["window"],
        }
    ).reset_index(drop=True)
    _write(RESULTS, rows.iloc[places.sort_values(["point", "idea", "window"]).index])
    facts = who_made("goodput") | {"minutes": round(minutes, 1), "num_replays": len(played)}
    made = pd.DataFrame([facts])
    _write(PROVENANCE, pd.concat([read(PROVENANCE), made]) if len(kept) else made)


def read(path: Path) -> pd.DataFrame:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: python -m experiments.goodput run")
    return pd.read_csv(path)


def _write(path: Path, table: pd.DataFrame) -> None:
    table.to_csv(path, index=False, float_format="%.6g")
