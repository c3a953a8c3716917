"""The results: a line of JSON for each cell, added when the cell is done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results.jsonl"


def append(row: Row, path: Path = RESULTS) -> None:
    """Add a cell."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path = RESULTS) -> list[Row]:
    """Return the cells by seed and number; of those that were played again, the latest result.

    A last line that an interrupted run left unfinished is skipped.
    """
    if not path.exists():
        return []
    latest: dict[str, Row] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError as error:
            if i == len(lines) - 1:
                break
            raise ValueError(f"line {i + 1} of {path} is no JSON ({error}): remove it") from error
        latest[row["name"]] = row
    return sorted(latest.values(), key=lambda row: (row["cell"]["seed"], row["cell"]["number"]))


def done(rows: Sequence[Row], contenders: str, code_digest: str) -> set[str]:
    """Return the names of cells that these contenders have played with this code."""
    return {
        row["name"]
        for row in rows
        if (row["contenders"], row["code_digest"]) == (contenders, code_digest)
    }
