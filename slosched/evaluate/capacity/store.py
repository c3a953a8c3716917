"""A SQLite file with every replay of a sweep: what was run, by which code, and its outcomes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import pandas as pd

from slosched.evaluate.capacity.code import code_digest, git_hash
from slosched.evaluate.capacity.outcomes import Outcomes
from slosched.evaluate.capacity.point import CapacityError, Point
from slosched.policy.spec import make_policy

_COLUMNS = {
    "key": "TEXT NOT NULL",
    "code": "TEXT NOT NULL",
    "git_hash": "TEXT",
    "made": "TEXT",
    "policy": "TEXT",
    "policy_repr": "TEXT",
    "trace": "TEXT",
    "trace_digest": "TEXT",
    "model": "TEXT",
    "model_digest": "TEXT",
    "config": "TEXT",
    "seed": "INTEGER",
    "rate": "REAL",
    "num_offered": "INTEGER",
    "num_counted": "INTEGER",
    "warm_up_s": "REAL",
    "attainment": "REAL",
    "outcomes_digest": "TEXT",
    "outcomes": "BLOB",
}


class Store:
    """Results by point and code; each is on the disk when `put` returns.

    A point is only found again by the code that it was made with (`code.code_digest`).
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or make it and its folder.  Raises CapacityError if it is not a store."""
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = ", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())
        try:
            self._connection = sqlite3.connect(path)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute(
                f"CREATE TABLE IF NOT EXISTS points ({columns}, PRIMARY KEY (key, code))"
            )
            self._connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM points LIMIT 0")
        except sqlite3.Error as error:
            raise CapacityError(
                f"{path} is not a store of capacity results ({error}): choose another --out "
                "folder, or move that file away"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def get(self, point: Point) -> Outcomes | None:
        """Return the outcomes of a point; None if this code has not run it."""
        row = self._connection.execute(
            "SELECT outcomes FROM points WHERE key = ? AND code = ?",
            (point.key, code_digest(point.policy)),
        ).fetchone()
        return None if row is None else Outcomes.unpack(row[0])

    def put(self, point: Point, outcomes: Outcomes, names: Mapping[str, str]) -> None:
        """Store the outcomes of a point; `names` of its `trace` and `model` are for readers."""
        values = {
            "key": point.key,
            "code": code_digest(point.policy),
            "git_hash": git_hash(),
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "policy": point.policy,
            "policy_repr": repr(make_policy(point.policy)),
            "trace": names["trace"],
            "trace_digest": point.trace,
            "model": names["model"],
            "model_digest": point.model,
            "config": json.dumps(asdict(point.config), sort_keys=True),
            "seed": point.config.seed,
            "rate": point.rate,
            "num_offered": len(outcomes.requests),
            "num_counted": int(outcomes.counted.sum()),
            "warm_up_s": outcomes.warm_up_s,
            "attainment": outcomes.attainment,
            "outcomes_digest": outcomes.digest,
            "outcomes": outcomes.pack(),
        }
        marks = ", ".join(f":{name}" for name in _COLUMNS)
        with self._connection:
            self._connection.execute(f"INSERT OR REPLACE INTO points VALUES ({marks})", values)

    def frame(self) -> pd.DataFrame:
        """Return a table with a row for each replay, and all columns except the outcomes."""
        columns = [name for name in _COLUMNS if name != "outcomes"]
        query = f"SELECT {', '.join(columns)} FROM points ORDER BY policy, model, rate, seed, made"
        return pd.read_sql_query(query, self._connection)
