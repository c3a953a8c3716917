"""The page about a run: what was measured on a GPU, beside what was predicted."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from experiments.markdown import table
from profiling.gpu.results import ResultsError
from profiling.gpu.scale import HERE
from profiling.gpu.traffic import PREDICTED, replay_of

PAGE = HERE.parents[1] / "docs" / "gpu.md"
_WITHIN = 0.05
"""The distance in attainment within which a prediction counts as right."""
Predictions = Mapping[str, Sequence[Mapping[Hashable, object]]]


def page_of(results: Path) -> Path:
    """Return where the page belongs: a rehearsal's stays with its results, out of the docs.

    Raises ResultsError if `results` holds no provenance.
    """
    return results / PAGE.name if _is_rehearsal(_runs(results)[-1]) else PAGE


def write_page(results: Path, bundled: Path, page: Path) -> None:
    """Write the page; stages that did not run are named as such.

    Raises ResultsError if `results` holds no provenance.
    """
    runs = _runs(results)
    parts = [
        _title(runs[-1]),
        _origin(runs),
        "## Attention backends",
        _conformance(results / "conformance.csv"),
        "## Latency models",
        "Errors in % of the measured time, on steps that were not fitted.",
        _table(results / "fit.csv"),
        "## Swaps",
        _table(results / "swap.csv"),
        "## Rooflines",
        "Steps with CUDA graphs and without, one by one (`seconds`) and with the next step "
        "launched before one has ended (`overlapped_s`). The rooflines are those of the peaks "
        "measured in the same run of the stage; each run has a row:",
        _table(results / "peaks.csv"),
        _table(results / "roofline.csv"),
        "## Attainment",
        _traffic(results, bundled),
    ]
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _runs(results: Path) -> Sequence[Mapping[str, str | None]]:
    """Return the origin of each run of a stage, the latest last."""
    path = results / "provenance.json"
    if not path.exists():
        raise ResultsError(f"{results} holds no provenance.json: run a stage with --out {results}")
    runs: Sequence[Mapping[str, str | None]] = json.loads(path.read_text(encoding="utf-8"))
    return runs


def _is_rehearsal(facts: Mapping[str, str | None]) -> bool:
    return facts["cuda"] == "none"


def _title(facts: Mapping[str, str | None]) -> str:
    if _is_rehearsal(facts):
        return f"# A rehearsal on {facts['device']}: no GPU has run this"
    return f"# The torch engine on {facts['device']}"


def _origin(runs: Sequence[Mapping[str, str | None]]) -> str:
    facts = runs[-1]
    names = ("device", "driver", "cuda", "python", "torch", "transformers", "triton", "commit")
    stages = [(run["stage"], run["began"], run["ended"] or "interrupted") for run in runs]
    said = ", ".join(f"{name} {facts[name]}" for name in names)
    return (
        f"Model {facts['model']} with random weights; {said}. Made by `python -m profiling.gpu "
        f"report` of these runs:\n\n{table(('stage', 'began', 'ended'), stages, 3)}"
    )


def _conformance(path: Path) -> str:
    if not path.exists():
        return _missing(path)
    found = pd.read_csv(path)
    found["passed"] = found["error"] <= found["allowed"]
    rows = [
        (*key, len(part), int(part["passed"].sum()), f"{part['error'].max():.2g}")
        for key, part in found.groupby(["backend", "dtype"])
    ]
    return table(("backend", "type", "cases", "passed", "largest error"), rows, 2)


def _table(path: Path) -> str:
    if not path.exists():
        return _missing(path)
    found = pd.read_csv(path)
    rows = [[_cell(value) for value in row] for row in found.itertuples(index=False)]
    num_texts = sum(not pd.api.types.is_numeric_dtype(kind) for kind in found.dtypes)
    return table(list(found.columns), rows, num_texts)


def _traffic(results: Path, bundled: Path) -> str:
    path = results / "traffic.csv"
    for needed in (results / PREDICTED, path):
        if not needed.exists():
            return _missing(needed)
    predicted: Predictions = {
        **json.loads(bundled.read_text(encoding="utf-8")),
        "fitted": json.loads((results / PREDICTED).read_text(encoding="utf-8")),
    }
    by_model = {
        name: {replay_of(row): float(str(row["attainment"])) for row in rows}
        for name, rows in predicted.items()
    }
    measured = pd.read_csv(path).to_dict("records")
    played = {replay_of(row) for row in measured}
    by_model = {name: guesses for name, guesses in by_model.items() if played <= guesses.keys()}
    right = dict.fromkeys(by_model, 0)
    rows = []
    for row in measured:
        guesses = {name: of[replay_of(row)] for name, of in by_model.items()}
        for name, guess in guesses.items():
            right[name] += abs(guess - row["attainment"]) <= _WITHIN
        rows.append(
            (
                *(row[name] for name in ("trace", "policy")),
                "overlapped" if row["overlap"] else "one by one",
                *(_cell(row[name]) for name in ("rate", "attainment")),
                *map(_cell, guesses.values()),
                _cell(row["tpot_p99_s"]),
            )
        )
    heads = ("trace", "policy", "steps", "rate", "measured", *by_model, "TPOT p99 in s")
    said = "; ".join(f"{name} {count} of {len(measured)}" for name, count in right.items())
    return (
        f"{table(heads, rows, 3)}\n\nPredicted within {_WITHIN:.2f}: {said}. The fitted model's "
        "predictions were made before the engine ran, with steps one by one."
    )


def _missing(path: Path) -> str:
    return f"`{path.name}` is missing: this stage has not run."


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
