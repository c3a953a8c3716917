"""A check that results of earlier code are results of today's code, too, by playing some again.

A change that is meant to leave every decision as it is, such as moving or renaming files, changes
the digest of the code.  If a sample of the stored results comes out the same to the last digit
that is stored, all of them are taken as today's.  The sample is kept in `carried_over.csv`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from experiments.arena.contenders import chosen
from experiments.arena.finals import FINE
from experiments.arena.heats import settled
from experiments.arena.results import Results
from experiments.arena.ring import Ring
from experiments.arena.rows import Row, knee_of
from experiments.arena.scenarios import SCALES, SCENARIOS, Scale, Scenario
from experiments.command import provenance
from slosched.evaluate.capacity import TARGETS, Plan, Store, Study


@dataclass(frozen=True)
class Again:
    """A stored row of `overload.csv`, and the same row as it comes out today."""

    stored: Row
    attainment: float

    @property
    def is_equal(self) -> bool:
        """Tell whether the attainments agree to the digits that are stored."""
        return f"{self.attainment:.6g}" == f"{self.stored['attainment']:.6g}"


def sample(results: Results, size: int, seed: int) -> list[Row]:
    """Draw rows of goodput in overload; every scenario has one before any has a second."""
    rows = results.read("overload").to_dict("records")
    random.Random(seed).shuffle(rows)
    drawn: list[Row] = []
    while rows and len(drawn) < size:
        met: set[str] = set()
        for row in list(rows):
            if row["scenario"] not in met and len(drawn) < size:
                met.add(str(row["scenario"]))
                rows.remove(row)
                drawn.append({str(name): value for name, value in row.items()})
    return drawn


def play_again(
    results: Results,
    rows: Sequence[Row],
    scenarios: Mapping[str, Scenario] = SCENARIOS,
    scales: Mapping[str, Scale] = SCALES,
) -> Iterator[Again]:
    """Play each row's requests under its contender, as tuned, at its load."""
    tables = results.tables()
    with TemporaryDirectory() as folder:
        for i, row in enumerate(rows):
            name = row["scenario"]
            runs = [run for run in tables["runs"] if run["scenario"] == name]
            scale, entries = scales[runs[0]["scale"]], chosen([row["contender"]])
            (who,) = [e for e in entries if e.name == row["contender"]]
            (tuned,) = settled(results.of("tuned", name), [who])
            plan = Plan(TARGETS, FINE, at_rate=row["load"] * knee_of(tables, name))
            with (
                Store(Path(folder) / f"{i}.sqlite") as store,
                Ring(scenarios[name], scale, store) as ring,
            ):
                windows = ring.overload_windows
                sweep = ring.sweep([tuned.contender(ring)], windows, plan)
            study = Study(list(sweep.measured.values()), windows)
            yield Again(row, float(study.frame()["attainment"].iloc[0]))


def carry_over(results: Results, replays: Iterable[Again], on_row: Callable[[Again], None]) -> int:
    """Record today's code for all scenarios if all `replays` came out as they are stored.

    Returns the number of scenarios taken over.  Raises ValueError at the first row that differs.
    """
    played = []
    for again in replays:
        on_row(again)
        if not again.is_equal:
            raise ValueError(
                f"{again.stored['contender']} in {again.stored['scenario']} at "
                f"{again.stored['load']:g}x: stored is an attainment of "
                f"{again.stored['attainment']:.6g}, today it is {again.attainment:.6g}; "
                "nothing is taken over: python -m experiments.arena run measures anew"
            )
        played.append(again.stored)
    made, runs = provenance("arena"), results.read("runs")
    earlier = sorted(set(runs["code_digest"]) - {made["code_digest"]})
    results.write("runs", runs.assign(code_digest=str(made["code_digest"])))
    kept = ("scenario", "contender", "load", "rate", "attainment")
    proof = pd.DataFrame(
        {
            **{name: row[name] for name in kept},
            "earlier_code": " ".join(earlier),
            **made,
        }
        for row in played
    )
    results.write("carried_over", proof)
    return len(runs)
