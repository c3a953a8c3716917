"""The table, notes, figure and document of `slosched plan`.

Imports matplotlib and pandas, so other modules import it only when they need it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.markup import escape

from slosched.cli.console import console, table
from slosched.cli.figures import save_figures
from slosched.cli.promised import promised_in
from slosched.evaluate.planning import Counts, Search, Trials, Verdict
from slosched.evaluate.plots import cost_frontier
from slosched.evaluate.report import Section, write_report

_COLUMNS = ("fleet", "per hour", "in time", "95 % interval", "")


@dataclass(frozen=True)
class PlanReport:
    """What a search has found, in words, figures and JSON."""

    title: str
    search: Search
    trials: Trials
    verdict: Verdict
    beyond: Mapping[str, str]
    """Why a kind of replica was not tried, by its name."""

    def show(self) -> None:
        """Print the table, and below it what to know of it."""
        console.print(self.title)
        target = f"{100 * self.search.target:.4g} %"
        console.print(table(f"The cheapest fleets with {target} in time", _COLUMNS, self._rows()))
        if said := promised_in(self.trials.windows):
            console.print(said)
        for note in self.notes():
            console.print(f"[yellow]note:[/] {escape(note)}")

    def leave(self, out: Path, provenance: Mapping[str, object]) -> None:
        """Write plan.json, fleets.csv, the report and its figure to the folder `out`."""
        frame = self.frame()
        frame.to_csv(out / "fleets.csv", index=False)
        (out / "plan.json").write_text(json.dumps(self.document(), indent=2), encoding="utf-8")
        figures = {"frontier": cost_frontier(frame, self.search.target)}
        save_figures(out, figures)
        chosen = pd.DataFrame(self._rows(), columns=[*_COLUMNS[:-1], "what it is"])
        promises = promised_in(self.trials.windows)
        said = "\n\n".join([f"{self.title}. {promises}", *self.notes()])
        sections = [
            Section("Plan", [said, chosen, *figures.values()]),
            Section("Fleets", ["Every fleet that was tried.", frame]),
        ]
        write_report(out / "report.html", "The cheapest fleet", sections, provenance)

    def document(self) -> dict[str, object]:
        """Return everything that was found, in a form that JSON can express."""
        verdict = self.verdict
        return {
            "target": self.search.target,
            "best": self._fleet(verdict.best),
            "second_best": self._fleet(verdict.second),
            "one_more_replica": self._fleet(verdict.more),
            "tried": [self._fleet(counts) for counts in self._by_price()],
            "out_of_reach": dict(self.beyond),
            "notes": list(self.notes()),
        }

    def frame(self) -> pd.DataFrame:
        """Return a table with a row for each fleet that was tried, the cheapest first."""
        rows = []
        for counts in self._by_price():
            judged = self.trials.judged[counts]
            rows.append(
                {
                    "fleet": self.name(counts),
                    "price_per_hour": self.search.price(counts),
                    "attainment": judged.attainment,
                    "low": judged.interval.low,
                    "high": judged.interval.high,
                }
            )
        return pd.DataFrame(rows)

    def name(self, counts: Counts) -> str:
        """Return the name of a fleet: `2 x h100 + 1 x l40s`."""
        return fleet_name(counts, [offer.name for offer in self.trials.offers])

    def notes(self) -> Iterator[str]:
        """Yield a sentence for everything that qualifies the result."""
        yield from self.beyond.values()
        verdict, target = self.verdict, self.search.target
        assert verdict.best is not None
        assert verdict.more is not None
        best, more = self.trials.judged[verdict.best], self.trials.judged[verdict.more]
        if best.interval.low < target:
            is_sure = more.interval.low >= target
            yield (
                f"{self.name(verdict.best)} may have only {best.interval.low:.2%} in time, the low "
                f"end of its interval; {self.name(verdict.more)} "
                f"{'surely keeps' if is_sure else 'is not sure to keep'} the target"
            )
        if not verdict.grows:
            yield (
                f"{self.name(verdict.more)} has only {more.attainment:.2%} in time, although it is "
                "larger than the cheapest fleet: the search takes for granted that more replicas "
                "serve no fewer requests in time, so give more requests with -n or --seeds"
            )
        if best.is_short:
            yield "half of a window is warm-up and that is too short: raise -n"

    def _rows(self) -> list[tuple[str, ...]]:
        verdict = self.verdict
        named = {verdict.best: "cheapest", verdict.second: "second best"}
        named[verdict.more] = named.get(verdict.more, "one replica more")
        for kind in range(len(self.trials.offers)):
            alone = self.search.least_of(kind)
            if alone is not None:
                named.setdefault(alone, f"only {self.trials.offers[kind].name}")
        chosen = [counts for counts in named if counts is not None]
        return [
            self._row(counts, named[counts]) for counts in sorted(chosen, key=self.search.price)
        ]

    def _row(self, counts: Counts, what: str) -> tuple[str, ...]:
        judged = self.trials.judged[counts]
        low, high = judged.interval
        price = f"{self.search.price(counts):.2f}"
        between = f"[{low:.2%}, {high:.2%}]"
        return (self.name(counts), price, f"{judged.attainment:.2%}", between, what)

    def _fleet(self, counts: Counts | None) -> dict[str, object] | None:
        if counts is None:
            return None
        judged = self.trials.judged[counts]
        setup = self.trials.setup(counts)
        numbers = zip(self.trials.offers, counts, strict=True)
        return {
            "replicas": {offer.model_name: count for offer, count in numbers if count},
            "num_gpus": sum(kind.num_gpus for kind in setup.replicas),
            "router": setup.router,
            "price_per_hour": self.search.price(counts),
            "attainment": judged.attainment,
            "interval": list(judged.interval),
        }

    def _by_price(self) -> list[Counts]:
        return sorted(self.trials.judged, key=lambda counts: (self.search.price(counts), counts))


def fleet_name(counts: Counts, names: Sequence[str]) -> str:
    """Return the name of a fleet with these numbers of replicas: `2 x h100 + 1 x l40s`."""
    pairs = zip(counts, names, strict=True)
    return " + ".join(f"{count} x {name}" for count, name in pairs if count)
