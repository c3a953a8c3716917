"""`python -m experiments.fleet`: which router, which policy, on four simulated replicas."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from experiments.command import make_app, start
from experiments.fleet import agents as agents_study
from experiments.fleet import truth as truth_study
from experiments.fleet.ceilings import CEILINGS, bound_all
from experiments.fleet.playing import play_cases
from experiments.fleet.pools import PAGE as POOLS_PAGE
from experiments.fleet.pools import page, play
from experiments.fleet.questions import POLICIES, QUESTIONS, Question
from experiments.fleet.scaling import PAGE as SCALING_PAGE
from experiments.fleet.scaling import page as scaling_page
from experiments.fleet.scaling import play as play_scaling
from experiments.fleet.tables import tables
from slosched.cli.console import console
from slosched.core import DeadlineRule
from slosched.evaluate.capacity.outcomes import Outcomes
from slosched.policy.spec import make_policy

RESULTS = Path(__file__).with_name("results.csv")
PAGE = Path(__file__).with_name("results.md")
_KEY = ["question", "rate", "policy", "router", "window"]

app = make_app(__doc__)


@app.command()
def run(
    only: Annotated[
        str | None, typer.Option(metavar="QUESTION", help="Play this question anew, and no other.")
    ] = None,
) -> None:
    """Play what results.csv does not have (all of it takes half an hour), and make results.md.

    Example: `python -m experiments.fleet run --only "conversations"`.
    """
    if only is not None and only not in [question.name for question in QUESTIONS]:
        raise ValueError(f"no question {only!r}; there are {', '.join(q.name for q in QUESTIONS)}")
    asked = [question for question in QUESTIONS if only in (None, question.name)]
    kept = pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=_KEY)
    kept = kept[kept["question"] != only]
    known = set(kept[_KEY].itertuples(index=False, name=None))
    cases = [
        (question, *case)
        for question in asked
        for case in product(question.rates, POLICIES, question.routers, range(question.num_windows))
        if (question.name, *case) not in known
    ]
    play_cases(cases, _row, kept, RESULTS)
    report()


@app.command()
def report() -> None:
    """Make results.md of the committed results.

    Example: `python -m experiments.fleet report`.
    """
    PAGE.write_text(tables(pd.read_csv(RESULTS), pd.read_csv(CEILINGS)), encoding="utf-8")
    console.print(f"wrote {PAGE}")


@app.command()
def ceilings() -> None:
    """Bound the windows that ceilings.csv does not have (two minutes), and make results.md.

    Example: `python -m experiments.fleet ceilings`.
    """
    bound_all()
    report()


@app.command()
def pools() -> None:
    """Play what pools.csv does not have (all of it takes ten minutes), and make pools.md.

    Example: `python -m experiments.fleet pools`.
    """
    play()
    POOLS_PAGE.write_text(page(), encoding="utf-8")
    console.print(f"wrote {POOLS_PAGE}")


@app.command()
def scaling() -> None:
    """Play what scaling.csv lacks (all of it takes seven minutes), and make scaling.md.

    Example: `python -m experiments.fleet scaling`.
    """
    play_scaling()
    SCALING_PAGE.write_text(scaling_page(), encoding="utf-8")
    console.print(f"wrote {SCALING_PAGE}")


@app.command()
def agents() -> None:
    """Play what agents.csv does not have (all of it takes 12 minutes), and make agents.md.

    Example: `python -m experiments.fleet agents`.
    """
    agents_study.play()
    agents_study.PAGE.write_text(agents_study.page(), encoding="utf-8")
    console.print(f"wrote {agents_study.PAGE}")


@app.command()
def truth() -> None:
    """Play what truth.csv does not have on real servers (15 minutes), and make truth.md.

    Example: `python -m experiments.fleet truth`.
    """
    truth_study.play()
    truth_study.PAGE.write_text(truth_study.page(), encoding="utf-8")
    console.print(f"wrote {truth_study.PAGE}")


def _row(
    question: Question, rate: float, policy: str, router: str, window: int
) -> Mapping[Hashable, object]:
    """Play one case, and return its share of requests in time, after the warm-up."""
    fleet = question.fleet(router)
    requests = fleet.simulate(question.traffic(window, rate), make_policy(policy), seed=window)
    share = Outcomes.of(requests, DeadlineRule.MEAN_TPOT).attainment
    return {
        "question": question.name,
        "rate": rate,
        "policy": policy,
        "router": router,
        "window": window,
        "in_time": round(share, 5),
    }


if __name__ == "__main__":
    start(app)
