"""Rows in committed CSV files, from which an interrupted run continues and the page is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.inside_vllm.heats import Row
from experiments.inside_vllm.setups import RESULTS

TUNING, RUNS, PREDICTIONS = "tuning", "runs", "predictions"
SAMPLE, SAMPLE_VIRTUAL = "sample", "sample_virtual"
"""The same runs in real time and in virtual time, in the same slow motion."""
MAX_LATENESS_S = 0.05
"""The limit in the device's time, beyond which the machine was too busy for a heat to count."""
_HEAT = ["setup", "rate", "window"]
_KEYS = [*_HEAT, "system"]


@dataclass(frozen=True)
class Book:
    """The tables of one folder, and the rules for which of their rows count."""

    folder: Path = RESULTS
    max_lateness_s: float = MAX_LATENESS_S
    since: str = ""
    """An ISO time; what was measured before it counts as not measured."""

    def read(self, name: str) -> pd.DataFrame:
        """Return a table; without rows if nothing has been measured yet."""
        path = self.folder / f"{name}.csv"
        if not path.exists():
            return pd.DataFrame(columns=_KEYS)
        return pd.read_csv(path, keep_default_na=False).astype({"rate": float})

    def keep(self, name: str, rows: Sequence[Row]) -> None:
        """Add `rows`, in place of those with the same setup, rate, window and system."""
        known = [row for row in (self.read(name), pd.DataFrame(rows)) if len(row)]
        table = pd.concat(known).drop_duplicates(_KEYS, keep="last").sort_values(_KEYS)
        self._write(name, table)

    def keep_heat(self, name: str, rows: Sequence[Row]) -> None:
        """Write the rows of one heat, in place of all its former rows."""
        table, heat = self.read(name), rows[0]
        if len(table):
            is_same = (table[_HEAT] == [heat[key] for key in _HEAT]).all(axis=1)
            self._write(name, table[~is_same])
        self.keep(name, rows)

    def has(self, name: str, setup: str, rate: float, window: int) -> bool:
        """Tell whether the heat was measured, with any systems, on a machine that kept up."""
        rows = self.of(name, setup)
        return bool(((rows["rate"] == rate) & (rows["window"] == window)).any())

    def valid(self, name: str) -> pd.DataFrame:
        """Return the rows of heats in which the client sent every request nearly on time."""
        rows = self.read(name)
        if rows.empty:
            return rows
        late_s = rows["max_lateness_s"] / rows["slowdown"]
        worst_s = late_s.groupby([rows[key] for key in _HEAT]).transform("max")
        return rows[worst_s <= self.max_lateness_s]

    def of(self, name: str, setup: str) -> pd.DataFrame:
        """Return the rows of a setup that count and are not too old."""
        rows = self._recent(self.valid(name))
        return rows[rows["setup"] == setup]

    def shown(self) -> pd.DataFrame:
        """Return the runs to compare: for each setup those with vLLM's most frequent budget."""
        rows = self.valid(RUNS)
        if rows.empty:
            return rows
        own = rows[rows["system"].str.startswith("vLLM ")]
        usual = own.groupby("setup")["system"].agg(lambda names: names.mode().iloc[0])
        together = own[own["system"] == own["setup"].map(usual)]
        heats = pd.MultiIndex.from_frame(together[_HEAT])
        return rows[pd.MultiIndex.from_frame(rows[_HEAT]).isin(heats)]

    def best_budget(self, setup: str) -> int:
        """Return the budget with which vLLM's own scheduler served most in time.

        Raises ValueError if vLLM was not tuned for the setup.
        """
        rows = self.of(TUNING, setup)
        if rows.empty:
            raise ValueError(
                f"vLLM's budget is not tuned for {setup}: `python -m experiments.inside_vllm tune "
                f"{setup}` does it"
            )
        means = rows.groupby("max_num_batched_tokens", as_index=False)["attainment"].mean()
        return int(means.loc[means["attainment"].argmax(), "max_num_batched_tokens"])

    def _recent(self, rows: pd.DataFrame) -> pd.DataFrame:
        return rows[rows["made"] >= self.since] if self.since and len(rows) else rows

    def _write(self, name: str, table: pd.DataFrame) -> None:
        """Replace the file in one step, so that an interruption leaves a whole file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.csv"
        table.to_csv(path.with_suffix(".new"), index=False, float_format="%.6g")
        path.with_suffix(".new").replace(path)
