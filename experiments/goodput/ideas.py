"""The ideas as data: goodput without one of its parts, with another one, or with one more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from experiments.goodput import parts
from experiments.goodput.plans import BankInPlan, Hurry
from slosched.core import Policy
from slosched.policy.goodput.policy import Goodput
from slosched.policy.published.past_future import PastFuture


@dataclass(frozen=True)
class Idea:
    """A variant of goodput; the results contain its name, and the page says `what` is different."""

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
        "every decode gets its token in every step",
        parts.NeverGivesWay,
    ),
    Idea(
        "always give way",
        "decodes give way whenever a prompt waits or has begun",
        parts.AlwaysGivesWay,
    ),
    Idea(
        "give way later",
        "decodes give way only if prompts would be late beside decodes at the pace of their TPOTs",
        parts.GivesWayLater,
    ),
    Idea(
        "give way to the last",
        "a decode is due in the last step that is in time for it, not in the one before",
        parts.GivesWayToTheLast,
    ),
    Idea(
        "steps as long as the slack",
        "a step may last longer than the smallest TPOT if the slack allows it",
        parts.LongSteps,
    ),
    Idea(
        "no end for a prompt",
        "a step that finishes a prompt may last until after that prompt is due",
        parts.NoEndForAPrompt,
    ),
    Idea(
        "late decodes do not count",
        "decodes that are late already do not shorten a step",
        parts.LateDecodesLeftOut,
    ),
    Idea(
        "the tightest binds",
        "the smallest TPOT limits the step, also if it cannot be kept",
        parts.TightestBinds,
    ),
    Idea(
        "floor of the study",
        "a step may always last 0.9 of the smallest TPOT, or take 128 tokens besides all decodes",
        partial(parts.WithFloor, shortest=0.9),
    ),
    Idea(
        "algorithm g",
        "`floor of the study` and `never give way` together",
        partial(parts.AlgorithmG, shortest=0.9),
    ),
    Idea("shortest 0.9", "`shortest=0.9`", partial(Goodput, shortest=0.9)),
    Idea("margin 0", "`margin=0`", partial(Goodput, margin=0.0)),
    Idea("margin 0.1", "`margin=0.1`", partial(Goodput, margin=0.1)),
    Idea(
        "upper quantile",
        "a step is limited by the time that only 1 % of steps exceed, not by its expected time",
        parts.UpperQuantile,
    ),
    Idea(
        "upper quantile, margin 0",
        "`upper quantile` instead of the margin",
        partial(parts.UpperQuantile, margin=0.0),
    ),
    *FAIRNESS,
    Idea(
        "no Moore-Hodgson",
        "all prompts go by deadline",
        parts.EveryoneByDeadline,
    ),
    Idea(
        "blind to seats",
        "prompts are planned as if there were seats (`max_num_seqs`) for all of them",
        parts.BlindToSeats,
    ),
    Idea(
        "seats twice as often",
        "decodes are expected to leave their seats after half of their stay",
        parts.SeatsTwiceAsOften,
    ),
    Idea(
        "by deadline without seats",
        "prompts go by deadline even if seats are scarcer than time",
        parts.ByDeadlineWithoutSeats,
    ),
    Idea(
        "shortest first",
        "when not all can be in time, prompts go by length, not by deadline",
        parts.ShortestFirst,
    ),
    Idea(
        "least commitment",
        "when not all can be in time, the shortest prompt that makes no other late goes first",
        parts.LeastCommitment,
    ),
    Idea(
        "reject when expired",
        "a prompt is rejected after its deadline, not as soon as it cannot be in time",
        parts.RejectExpired,
    ),
    Idea("no tiles", "chunks end anywhere, not with a whole tile of 64 tokens", parts.NoTiles),
    Idea(
        "bank in the plan",
        "in the plan, decodes cost only the tokens that they owe until each prompt is due",
        BankInPlan,
    ),
    Idea(
        "Past-Future",
        "no request starts that would outgrow the cache, judged by lengths of finished requests",
        lambda: PastFuture(Goodput()),
    ),
    Idea(
        "hurry",
        "while waiting prompts would leave less than 10 % of the cache free, no decode gives way "
        "and steps last 0.65 of the smallest TPOT",
        Hurry,
    ),
    Idea(
        "hurry, short steps only",
        "`hurry`, but decodes give way as in goodput",
        partial(Hurry, only_in_step=True),
    ),
    Idea(
        "hurry, spare 0",
        "`hurry` only while the cache has no room for the waiting prompts",
        partial(Hurry, spare=0.0),
    ),
    Idea("hurry, spare 0.2", "`hurry` with 20 % instead of 10 %", partial(Hurry, spare=0.2)),
    Idea(
        "hurry for seats",
        "`hurry` also while there are too few seats for the waiting prompts",
        partial(Hurry, count_seats=True),
    ),
)
