"""The targets that were to be reached, as data, and whether they were."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.arena.contenders import Class
from experiments.arena.rows import Row, Tables, among, best, pick
from experiments.arena.scenarios import SCENARIOS, Scenario

FLAGSHIP = "goodput"
RIVALS = (Class.DROPPING.value, Class.PUBLISHED.value)
"""The classes that may drop requests, as our policies may."""
_MAX_DECISION_S = 1e-3
_OF_BOUND = 0.95


@dataclass(frozen=True)
class Verdict:
    """A target, what was found, and whether that is enough."""

    what: str
    against: str
    at_least: str
    found: str
    is_reached: bool | None
    """Whether the target is reached; None if nothing was measured yet."""

    @property
    def said(self) -> str:
        return {True: "reached", False: "**not reached**", None: "not measured"}[self.is_reached]


@dataclass(frozen=True)
class _Target:
    """A least ratio in each of these scenarios, and perhaps a least geometric mean."""

    metric: str
    classes: Sequence[str]
    where: str
    scenarios: Sequence[str]
    at_least: float
    in_the_mean: float | None = None


def _named(begin: str) -> list[str]:
    return [name for name, one in SCENARIOS.items() if name.startswith(begin) and _is_d1(one)]


def _is_d1(scenario: Scenario) -> bool:
    return scenario.rule.value == "mean_tpot"


_D1 = _named("")
_OTHER_RULES = [name for name, one in SCENARIOS.items() if not _is_d1(one)]
_OTHER_CONV = [name for name in _named("conv-") if name != "conv-tight"]
_DROPPING, _PUBLISHED = [Class.DROPPING.value], [Class.PUBLISHED.value]
_TARGETS = (
    _Target("capacity 99%", _DROPPING, "conv-tight", ["conv-tight"], 1.15),
    _Target("capacity 99%", _DROPPING, "other sets of Azure conv", _OTHER_CONV, 1.05),
    _Target("capacity 99%", _DROPPING, "Azure code", _named("code-"), 1.6),
    _Target("capacity 99%", _DROPPING, "Mooncake", _named("mooncake-"), 1.8),
    _Target("capacity 99%", _PUBLISHED, "everywhere", _D1, 1.0, 1.1),
    _Target("goodput 2x", RIVALS, "everywhere", _D1, 1.0, 1.15),
    _Target("capacity 99%", RIVALS, "under `tbt` and `envelope`", _OTHER_RULES, 0.98),
)


def verdicts(tables: Tables) -> Iterator[Verdict]:
    """Yield a verdict on every target that the arena can judge."""
    for target in _TARGETS:
        yield from _judge(tables["ratios"], target)
    loads = sorted({row["load"] for row in tables["bounds"]}) or [1.0]
    yield _judge_bound(tables["bounds"], loads[:1])
    yield _judge_bound(tables["bounds"], loads)
    yield _judge_cost(tables["cost"])


def asked_of(scenario: str) -> float:
    """Return the least ratio to the best with dropping that a target sets; 1 if none does."""
    mine = [t for t in _TARGETS if t.classes == _DROPPING and scenario in t.scenarios]
    return max((target.at_least for target in mine), default=1.0)


def hardest_rival(
    ratios: Sequence[Row], scenario: str, metric: str, classes: Sequence[str]
) -> Row | None:
    """Return the ratio to the best of all these classes; None if there is no such ratio."""
    rows = pick(ratios, scenario=scenario, metric=metric, ours=FLAGSHIP)
    rows = [row for row in among(rows, "class", classes) if not math.isnan(row["ratio"])]
    return min(rows, key=lambda row: float(row["ratio"]), default=None)


def share_of_bound(bounds: Sequence[Row], scenario: str, load: float, who: str) -> Row | None:
    """Return good requests over the least bound, and its name; None if it was not measured."""
    here = pick(bounds, scenario=scenario, load=load)
    mine, limits = pick(here, who=who), pick(here, class_="bound")
    if not (mine and limits):
        return None
    tightest = min(limits, key=lambda row: int(row["num_good"]))
    most, good = int(tightest["num_good"]), int(mine[0]["num_good"])
    return {
        "scenario": scenario,
        "load": load,
        "who": who,
        "attainment": good / mine[0]["num_offered"],
        "bound": tightest["who"],
        "of_bound": good / most if most else 1.0,
    }


def _judge(ratios: Sequence[Row], target: _Target) -> Iterator[Verdict]:
    found = [hardest_rival(ratios, s, target.metric, target.classes) for s in target.scenarios]
    rows = [row for row in found if row is not None]
    against = f"best {' or '.join(target.classes)}"
    what = f"{target.metric}, {target.where}"
    if not rows:
        yield Verdict(what, against, f"{target.at_least:g}×", "–", None)
        return
    worst = min(rows, key=lambda row: float(row["ratio"]))
    said = f"{worst['ratio']:.2f}× [{worst['low']:.2f}, {worst['high']:.2f}] over "
    said += f"{worst['best']} in {worst['scenario']}"
    yield Verdict(
        what, against, f"{target.at_least:g}×", said, bool(worst["ratio"] >= target.at_least)
    )
    if target.in_the_mean is not None:
        mean = math.exp(math.fsum(math.log(row["ratio"]) for row in rows) / len(rows))
        said = f"{mean:.2f}×, geometric, over {len(rows)}"
        yield Verdict(
            f"{what}, in the mean",
            against,
            f"{target.in_the_mean:g}×",
            said,
            mean >= target.in_the_mean,
        )


def _judge_bound(bounds: Sequence[Row], loads: Sequence[float]) -> Verdict:
    what = f"attainment, at {', '.join(f'{load:g}×' for load in loads)}"
    against = "the least bound"
    cases = dict.fromkeys((row["scenario"], row["load"]) for row in among(bounds, "load", loads))
    found = [share_of_bound(bounds, *case, FLAGSHIP) for case in cases]
    shares = [share for share in found if share is not None]
    if not shares:
        return Verdict(what, against, f"{_OF_BOUND:g}", "–", None)
    worst = min(shares, key=lambda share: float(share["of_bound"]))
    said = f"{worst['of_bound']:.3f} of {worst['bound']} in {worst['scenario']} at "
    said += f"{worst['load']:g}×"
    return Verdict(what, against, f"{_OF_BOUND:g}", said, worst["of_bound"] >= _OF_BOUND)


def _judge_cost(cost: Sequence[Row]) -> Verdict:
    what, limit = "a decision, 256 running and 1,000 waiting", f"≤ {_MAX_DECISION_S * 1e3:g} ms"
    mine = best(pick(cost, policy=FLAGSHIP), "median_s")
    if mine is None:
        return Verdict(what, "–", limit, "–", None)
    median_s = float(mine["median_s"])
    return Verdict(what, "–", limit, f"{median_s * 1e3:.2f} ms", median_s <= _MAX_DECISION_S)
