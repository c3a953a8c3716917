"""The folder of results: rows in CSV files, and the origin of each in `provenance.json`."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch

from profiling.gpu.scale import Scale
from slosched.core import SloschedError
from slosched.evaluate.capacity.code import git_hash, tree_digest
from slosched.perfmodel.device import cpu_name

_PACKAGES = ("numpy", "pandas", "scipy", "scikit-learn", "torch", "transformers", "triton")
Cell = str | int | float


class ResultsError(SloschedError):
    """A folder of results does not belong to this run, or lacks what a stage needs."""


class Rows:
    """The rows of a CSV file, each of which is appended as soon as it is measured."""

    def __init__(self, path: Path, columns: Sequence[str], num_keys: int) -> None:
        """Open the file; the first `num_keys` columns tell which measurement a row is.

        A last line that an interruption cut off is dropped.  Raises ResultsError if the file has
        other columns.
        """
        self._path = path
        self._columns = list(columns)
        self._num_keys = num_keys
        if not path.exists():
            self._append(self._columns)
        text = path.read_text(encoding="utf-8")
        if not text.endswith("\n"):
            path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
        with path.open(encoding="utf-8", newline="") as file:
            found, *rows = [*csv.reader(file)] or [[]]
        if found != self._columns:
            raise ResultsError(
                f"{path} has the columns {', '.join(found)}, not {', '.join(columns)}: "
                "give an empty folder with --out"
            )
        self._known = {tuple(row[:num_keys]) for row in rows}

    def __contains__(self, key: Sequence[Cell]) -> bool:
        return tuple(map(str, key)) in self._known

    def add(self, *cells: Cell) -> None:
        """Append a row."""
        self._append(cells)
        self._known.add(tuple(map(str, cells[: self._num_keys])))

    def _append(self, cells: Sequence[Cell]) -> None:
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(cells)


@contextmanager
def noted(out: Path, stage: str, scale: Scale) -> Iterator[None]:
    """Note in `provenance.json` when a stage ran, on what machine, and whether it ended.

    Raises ResultsError if the folder holds results of another device, model or torch.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "provenance.json"
    runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    machine = _machine(scale)
    for name in ("device", "model", "torch") if runs else ():
        if runs[0][name] != machine[name]:
            raise ResultsError(
                f"{out} holds results of another {name} ({runs[0][name]}, now {machine[name]}): "
                "give another folder with --out"
            )
    run = {"stage": stage, "began": _now(), "ended": None, **machine}
    write_json(path, [*runs, run])
    yield
    write_json(path, [*runs, {**run, "ended": _now()}])


def write_json(path: Path, value: object) -> None:
    """Write a file all at once, so that an interruption leaves the old one."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def device_name(device: str) -> str:
    """Return the name of the GPU or of the processor."""
    return torch.cuda.get_device_name() if device == "cuda" else cpu_name()


def _machine(scale: Scale) -> Mapping[str, str]:
    return {
        "device": device_name(scale.model.device),
        "driver": _driver(),
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "model": Path(scale.model.model).name,
        "commit": git_hash(),
        "code_digest": tree_digest()[:16],
        "command": shlex.join(["python", "-m", "profiling.gpu", *sys.argv[1:]]),
    }


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    return path.read_text(encoding="utf-8").splitlines()[0] if path.exists() else "none"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
