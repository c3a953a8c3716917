"""Answers to a portfolio's question: its candidates replay the same requests side by side.

A candidate that surely gains too little drops out on the way, and the replays end as soon as only
the candidate that plans is left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from slosched.core import Policy
from slosched.policy.portfolio.question import Answer, PastRequest, Question, asking_in
from slosched.policy.portfolio.scores import LEAST_BLOCKS, LEAST_JUDGED, Scores, ends_of_blocks
from slosched.simulator.rehearsal import Passes, Rehearsal, draw_lengths
from slosched.simulator.turns import first_alike

_SEEN_TROUBLE = 0.5
"""Share of the judged requests in trouble that are replayed before a candidate may drop out."""


def answer(question: Question, after_each: Callable[[float], None] = lambda _cpu_s: None) -> Answer:
    """Replay the question's requests under its candidates.

    `after_each` is called with the processor time of each part of a candidate's replay.
    """
    # Imports all policies, which only the replays of a portfolio need.
    from slosched.policy.spec import make_policy

    began_s = time.process_time()
    first, has_turned = first_alike(question.requests)
    if len(question.requests) - first < LEAST_JUDGED:
        return Answer({}, first, has_turned)
    lengths = draw_lengths(question)
    passes = _repeated(question, first)
    good: dict[str, tuple[float, ...]] = {}
    failed = {}
    replays: dict[str, Rehearsal] = {}
    behind: dict[str, tuple[float, ...]] = {}
    racing = [*question.candidates, *(question.eliminated if has_turned else ())]
    for num_judged in _looks(question.requests[first:], passes):
        for spec in tuple(racing):
            part_s = time.process_time()
            try:
                if spec not in replays:
                    replays[spec] = Rehearsal(question, passes, lengths, make_policy(spec))
                good[spec] = tuple(replays[spec].judge(num_judged))
            except Exception as error:  # a candidate's own; the others are worth an answer
                failed[spec] = f"{type(error).__name__}: {error}"
                racing.remove(spec)
                good.pop(spec, None)
            after_each(time.process_time() - part_s)
        losers = _losers({spec: good[spec] for spec in racing}, question)
        racing = [spec for spec in racing if spec not in losers]
        behind |= {spec: _difference(good[spec], good[question.current]) for spec in losers}
        if racing == [question.current]:
            break
    if question.current in good:
        good |= {spec: _sum(good[question.current], lag) for spec, lag in behind.items()}
    return Answer(good, first, has_turned, failed, time.process_time() - began_s)


def _looks(judged: Sequence[PastRequest], passes: Passes) -> Iterator[int]:
    """Yield by how many judged requests, over all passes, the candidates are compared.

    A single pass is looked at where blocks end, once enough of the requests in trouble were
    replayed.  Of several passes the first half is not looked at, since what a policy brings about
    may take long to show.
    """
    num, num_passes = len(judged), passes.num_passes
    if num_passes == 1:
        in_trouble = np.cumsum([past.in_trouble for past in judged])
        for end in ends_of_blocks(num)[LEAST_BLOCKS - 1 : -1]:
            if in_trouble[end - 1] >= _SEEN_TROUBLE * in_trouble[-1]:
                yield end
    yield from (k * num for k in range((num_passes + 1) // 2, num_passes + 1))


def _losers(good: Mapping[str, Sequence[float]], question: Question) -> Sequence[str]:
    """Return the candidates that need not be replayed any further."""
    if question.current not in good:
        return ()
    scores = Scores()
    scores.add(good)
    losers = scores.losers(scores.best(question.current), question.min_gain)
    return [spec for spec in losers if spec != question.current]


def _difference(good: Sequence[float], of_current: Sequence[float]) -> tuple[float, ...]:
    """Return by how much better each request was served when the candidate dropped out."""
    return tuple(mine - its for mine, its in zip(good, of_current, strict=False))


def _sum(of_current: Sequence[float], differences: Sequence[float]) -> tuple[float, ...]:
    """Return the shares of a candidate that dropped out, as if it had replayed all passes.

    The later passes are harder, and the others have replayed them.
    """
    return tuple(its + more for its, more in zip(of_current, differences, strict=False))


def _repeated(question: Question, first: int) -> Passes:
    """Return how often the judged requests arrive: once if they span half of the horizon."""
    requests, horizon_s = question.requests, question.horizon_s
    num_judged = len(requests) - first
    period_s = requests[-1].arrival_s - requests[first].arrival_s
    period_s *= num_judged / max(1, num_judged - 1)  # a gap before the next pass
    if not 0 < period_s < horizon_s / 2:
        return Passes(first, 1, period_s)
    most = max(1, (question.max_requests - first) // num_judged)
    return Passes(first, min(most, math.ceil(horizon_s / period_s)), period_s)


class InLine:
    """A forecaster that answers at once, in the thread that asks."""

    is_busy = False

    def __init__(self) -> None:
        self._answer: Answer | None = None

    def ask(self, question: Question) -> bool:
        self._answer = answer(question)
        return True

    def take_answer(self) -> Answer | None:
        taken, self._answer = self._answer, None
        return taken


def rehearse_in_line(policy: Policy) -> None:
    """Let `policy`, or the one that it wraps, be answered in line if it asks a simulator."""
    asking = asking_in(policy)
    if asking is not None and asking.forecaster is None:
        asking.forecast_with(InLine())
