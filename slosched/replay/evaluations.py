"""Evaluations of a portfolio as a JSON-lines file, one line for each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from shlex import quote
from typing import Any

from slosched.policy.portfolio.evaluation import Evaluation, Reason, Score
from slosched.replay.files import RecordsError, parsed
from slosched.replay.json_fields import Fields

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
    return [parsed(path, i, line, _evaluation) for i, line in enumerate(lines, start=1)]


def _evaluation(values: dict[str, Any]) -> Evaluation:
    """Return the evaluation that a line tells; raise ValueError for a line that tells of none."""
    given = Fields(values)
    _check_names(values, Evaluation)
    for name in given.inner("scores"):
        _check_names(Fields(values["scores"]).inner(name), Score)
    given.inner("failed")
    given.member("reason", Reason)
    if not isinstance(values["eliminated"], list):
        raise given.wrong("eliminated", "a list of candidates")
    return Evaluation.from_json(values)


def _check_names(values: Mapping[str, Any], kind: type[Evaluation | Score]) -> None:
    """Raise ValueError if an object has not just the fields of its kind."""
    names = [each.name for each in fields(kind)]
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"it has no {missing[0]!r}")
    if more := sorted(values.keys() - names):
        raise ValueError(f"it has {more[0]!r}, which is no part of it")
