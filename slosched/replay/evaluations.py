"""Evaluations of a portfolio as a JSON-lines file, one line for each."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from shlex import quote

from slosched.policy.portfolio.evaluation import Evaluation
from slosched.replay.files import RecordsError, parsed

FILE_NAME = "evaluations.jsonl"


def write_evaluations(folder: Path, evaluations: Iterable[Evaluation]) -> Path:
    """Write evaluations into `folder`, and make it; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    path.write_text("".join(f"{json.dumps(e.as_json())}\n" for e in evaluations), "utf-8")
    return path


def read_evaluations(folder: Path) -> list[Evaluation]:
    """Read the evaluations in `folder`.  Raises RecordsError with file and line if it cannot."""
    path = folder / FILE_NAME
    if not path.exists():
        is_there = folder.is_dir()
        lacks = f"{folder} has no {FILE_NAME}" if is_there else f"there is no folder {folder}"
        raise RecordsError(
            f"{lacks}: name the folder of a simulated replay of a portfolio on "
            f"one replica, as `slosched replay -p portfolio -o {quote(str(folder))}` leaves it"
        )
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RecordsError(f"{path} is not a text file: {error}") from error
    return [parsed(path, i, line, Evaluation.from_json) for i, line in enumerate(lines, start=1)]
