"""What no router and no scheduler can exceed on the windows that the questions play."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.fleet.questions import QUESTIONS, Question
from slosched.cli.console import progress_bar
from slosched.evaluate.bounds import Bounds, fleet_bounds

CEILINGS = Path(__file__).with_name("ceilings.csv")
_KEY = ["question", "rate", "window"]


def bound_all() -> None:
    """Bound the windows that ceilings.csv does not have, of those questions that have a bound."""
    kept = pd.read_csv(CEILINGS) if CEILINGS.exists() else pd.DataFrame(columns=_KEY)
    known = set(kept[_KEY].itertuples(index=False, name=None))
    cases = [
        (question, rate, window)
        for question in QUESTIONS
        for rate in question.rates
        for window in range(question.num_windows)
        if (question.name, rate, window) not in known
    ]
    rows = kept.to_dict("records")
    with progress_bar() as progress:
        for question, rate, window in progress.track(cases, description="bounding"):
            bounds = _bounds(question, rate, window)
            if bounds.why_none_holds is None:
                rows.append(
                    {
                        "question": question.name,
                        "rate": rate,
                        "window": window,
                        "most_in_time": round(bounds.tightest.attainment, 5),
                        "most_per_s": round(bounds.each[0].sustained_per_s, 2),
                    }
                )
                pd.DataFrame(rows).to_csv(CEILINGS, index=False)


def _bounds(question: Question, rate: float, window: int) -> Bounds:
    return fleet_bounds(question.traffic(window, rate), question.fleet(question.routers[0]))
