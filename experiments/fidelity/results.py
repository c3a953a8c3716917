"""Simulated stages as a committed CSV, beside the measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from experiments.command import provenance
from experiments.fidelity.models import Server, chosen_backends
from experiments.fidelity.stages import MEASURED

HERE = Path(__file__).parent / "results"
SIMULATED = "h100"
_MADE = "provenance"
LEARNT_FROM = ("20260217-155451-llama-2-7b-tp1-codegen", "20260217-231439-llama-2-7b-tp1-general")
"""The runs from which the server's time per request is learnt; all others judge."""
SEEN = ("Mixtral-8x7B-v0.1", "Llama-3.1-70B-Instruct", "Qwen2.5-7B-Instruct")
"""Models whose misses led to a rule or a term; what that did to their runs proves little."""
_KEY = ["run", "stage"]


def path_of(name: str, folder: Path = HERE) -> Path:
    return folder / f"{name}.csv"


def read(name: str, folder: Path = HERE) -> pd.DataFrame:
    """Return the rows that were written last.  Raises FileNotFoundError if there are none."""
    path = path_of(name, folder)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: `python -m experiments.fidelity run` makes it")
    return pd.read_csv(path)


def write(name: str, rows: pd.DataFrame, folder: Path = HERE) -> None:
    """Write rows, and who made them into the file of provenance."""
    folder.mkdir(parents=True, exist_ok=True)
    rows.to_csv(path_of(name, folder), index=False, float_format="%.6g")
    made = pd.DataFrame([{"results": name, **provenance("fidelity")}])
    if path_of(_MADE, folder).exists():
        before = read(_MADE, folder)
        made = pd.concat([before[before["results"] != name], made])
    made.sort_values("results").to_csv(path_of(_MADE, folder), index=False)


def replace_run(
    name: str, run: str, rows: Iterable[Mapping[str, object]], folder: Path = HERE
) -> None:
    """Write the rows of one run in place of those that it had with the same backends."""
    new = pd.DataFrame(list(rows))
    if path_of(name, folder).exists():
        before = read(name, folder)
        is_replaced = (before["run"] == run) & before["backend"].isin(new["backend"])
        new = pd.concat([before[~is_replaced], new])
    write(name, new.sort_values(["run", "backend", "stage"]), folder)


def who_made(name: str, folder: Path = HERE) -> pd.Series:
    made = read(_MADE, folder)
    return made[made["results"] == name].iloc[0]


def compared(folder: Path = HERE) -> pd.DataFrame:
    """Return a row for each stage and backend: measured, simulated (`…_sim`), and settings.

    `is_chosen` tells whether slosched itself took this backend's tables.
    """
    measured = pd.read_csv(MEASURED)
    both = measured.merge(read(SIMULATED, folder), on=_KEY, suffixes=("", "_sim"))
    chosen = chosen_backends()
    servers = map(Server, both["model"], both["tensor_parallel"])
    taken = [chosen.get(server) for server in servers]
    return both.assign(is_chosen=both["backend"] == taken)
