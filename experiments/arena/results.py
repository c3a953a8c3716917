"""The results as committed CSV files, one for each kind, from which the page is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.arena.rows import Tables

HERE = Path(__file__).parent / "results"
KINDS = (
    *("runs", "tuned", "capacity", "overload", "ratios", "deciles"),
    *("bounds", "ceilings", "lasting", "oracle", "cost", "carried_over"),
)
"""Kinds of results; `runs` has for each scenario its scale, code, machine and time."""


@dataclass(frozen=True)
class Results:
    """A folder of tables.  A scenario that is measured again replaces its former rows."""

    folder: Path = HERE

    def read(self, kind: str) -> pd.DataFrame:
        """Return a table; empty if there is none yet."""
        path = self._path(kind)
        if not path.exists():
            return pd.DataFrame({"scenario": []})
        return pd.read_csv(path, keep_default_na=False, na_values=["nan"])

    def tables(self) -> Tables:
        """Return all tables, as records."""
        return {
            kind: [
                {str(name): value for name, value in row.items()}
                for row in self.read(kind).to_dict("records")
            ]
            for kind in KINDS
        }

    def of(self, kind: str, scenario: str) -> pd.DataFrame:
        table = self.read(kind)
        return table[table["scenario"] == scenario]

    def put(self, kind: str, scenario: str, rows: pd.DataFrame) -> None:
        """Replace all rows of the scenario."""
        table = self.read(kind)
        kept = table[table["scenario"] != scenario]
        self.write(kind, pd.concat([kept, rows]) if len(kept) else rows)

    def write(self, kind: str, table: pd.DataFrame) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # An interrupted write leaves the old file.
        unfinished = self._path(kind).with_suffix(".new")
        table.to_csv(unfinished, index=False, float_format="%.6g", na_rep="nan")
        unfinished.replace(self._path(kind))

    def _path(self, kind: str) -> Path:
        if kind not in KINDS:
            raise ValueError(f"no kind of result {kind!r}; there are {', '.join(KINDS)}")
        return self.folder / f"{kind}.csv"
