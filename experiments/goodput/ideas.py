"""The ideas, as data: goodput without one of its parts, with another in its place, or one more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from experiments.goodput import parts
from experiments.goodput.plans import BankInPlan, Hurry
from slosched.core import Policy
from slosched.policy.goodput import Goodput
from slosched.policy.published.past_future import PastFuture


@dataclass(frozen=True)
class Idea:
    """A variant of goodput, under the name that the results have it by."""

    name: str
    what: str
    policy: Callable[[], Policy] = Goodput


BASE = Idea("goodput", "as it is")
FAIRNESS = tuple(
    Idea(f"fairness {f:g}", f"`fairness={f:g}`", partial(Goodput, fairness=f))
    for f in (0.25, 0.5, 1.0)
)
IDEAS = (
    BASE,
    Idea(
        "never give way",
        "all decodes in every step",
        parts.NeverGivesWay,
    ),
    Idea(
        "always give way",
        "whenever a prompt waits or has begun",
        parts.AlwaysGivesWay,
    ),
    Idea(
        "give way later",
        "if prompts would be late beside decodes at the pace of their TPOTs, not in every step",
        parts.GivesWayLater,
    ),
    Idea(
        "give way to the last",
        "decodes are due in the last step that is in time for them, not one before",
        parts.GivesWayToTheLast,
    ),
    Idea("steps as long as the slack", "not at most the smallest TPOT", parts.LongSteps),
    Idea(
        "no end for a prompt",
        "a step that finishes one may last until after it is due",
        parts.NoEndForAPrompt,
    ),
    Idea(
        "late decodes do not count",
        "a step is as long as those allow that can still be in time",
        parts.LateDecodesLeftOut,
    ),
    Idea(
        "floor of the study",
        "at least 0.9 of the smallest TPOT, and 128 tokens beside all decodes",
        partial(parts.WithFloor, shortest=0.9),
    ),
    Idea(
        "algorithm g",
        "that floor, and never give way",
        partial(parts.AlgorithmG, shortest=0.9),
    ),
    Idea("shortest 0.9", "`shortest=0.9`", partial(Goodput, shortest=0.9)),
    Idea("margin 0", "`margin=0`", partial(Goodput, margin=0.0)),
    Idea("margin 0.1", "`margin=0.1`", partial(Goodput, margin=0.1)),
    Idea(
        "upper quantile",
        "steps end in time by the time that only 1 % of them exceed",
        parts.UpperQuantile,
    ),
    Idea(
        "upper quantile, margin 0",
        "the same in place of the margin",
        partial(parts.UpperQuantile, margin=0.0),
    ),
    *FAIRNESS,
    Idea(
        "no Moore-Hodgson",
        "all prompts by deadline",
        parts.EveryoneByDeadline,
    ),
    Idea(
        "blind to seats",
        "the number of requests that may run at once is not counted when prompts are planned",
        parts.BlindToSeats,
    ),
    Idea(
        "seats twice as often",
        "counted, but decodes are thought to stay half as long",
        parts.SeatsTwiceAsOften,
    ),
    Idea(
        "by deadline without seats",
        "counted, but then prompts go by deadline all the same",
        parts.ByDeadlineWithoutSeats,
    ),
    Idea(
        "shortest first",
        "when not all can be in time, prompts go by length, not by deadline",
        parts.ShortestFirst,
    ),
    Idea(
        "least commitment",
        "then the shortest goes that makes no other late: long ones wait as long as they can",
        parts.LeastCommitment,
    ),
    Idea(
        "reject when expired",
        "not as soon as a prompt cannot be in time",
        parts.RejectExpired,
    ),
    Idea("no tiles", "chunks end anywhere", parts.NoTiles),
    Idea(
        "bank in the plan", "decodes cost only what they owe until each prompt is due", BankInPlan
    ),
    Idea(
        "Past-Future",
        "nobody starts that would outgrow the cache, by the lengths of those before",
        lambda: PastFuture(Goodput()),
    ),
    Idea(
        "hurry",
        "while waiting prompts leave < 10 % of the cache, none gives way and steps last 0.65 TPOT",
        Hurry,
    ),
    Idea("hurry, short steps only", "decodes give way as ever", partial(Hurry, only_in_step=True)),
    Idea("hurry, spare 0", "only once prompts find no room", partial(Hurry, spare=0.0)),
    Idea("hurry, spare 0.2", "at 20 %", partial(Hurry, spare=0.2)),
    Idea("hurry for seats", "too few seats count, too", partial(Hurry, count_seats=True)),
)
