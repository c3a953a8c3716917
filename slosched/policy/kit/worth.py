"""Which of many TPOTs to keep while not all prompts can be in time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from slosched.core import DeadlineRule, LatencyModel, Request, SchedulerView
from slosched.policy.kit.chunks import Chunk, chunks_beside, in_a_tpot
from slosched.policy.kit.long_steps import tokens_per_s_in_turns
from slosched.policy.kit.pace import Pace, stay_tokens

_NUM_ARRIVALS = 64
"""Latest arrivals that stand for those to come."""
_LEAST_ARRIVALS = 16
"""Arrivals before which every TPOT that can be kept is kept."""
_MOST_TIERS = 8
"""TPOTs that are weighed; of more, so many quantiles are."""
_LEAST_GAIN = 1.02
"""Factor by which more requests must be good with a larger TPOT."""
_UNUSED_TTFT = 0.9
"""Share of a TTFT that is left when the first token comes, as a guess.  Under the rule `envelope`
the tokens after it have that time, too."""
_LEAST_STAY_TOKENS = 20.0
"""Least number of tokens that this time is divided among."""


class _Arrival(NamedTuple):
    arrival_s: float
    num_tokens: int
    """Tokens of its prompt that were to be computed when it arrived."""
    tpot_s: float
    ttft_s: float


class Worth:
    """The smallest TPOT that is worth keeping, judged anew whenever a request arrives.

    The smaller the TPOT that steps keep, the fewer prompt tokens go through; the larger it is, the
    more requests ask for less.  The latest arrivals tell how many tokens come in a second and which
    TPOTs they ask for.  For each TPOT of the decodes the latency model tells how many tokens go
    through, in steps no longer than it or in turns of long and short ones.  The shortest prompts
    go first.  The most requests are good at the TPOT with the largest product of two shares:
    prompts that go through, and requests that ask for this TPOT or a larger one.  These are all
    only at the smallest TPOT of the decodes, if that can be kept.
    """

    def __init__(self) -> None:
        self._arrivals: deque[_Arrival] = deque(maxlen=_NUM_ARRIVALS)
        self._last_s = -math.inf
        self._is_new = False
        self._tpot_s = 0.0
        """The smallest TPOT worth keeping; 0 if all that can be kept are."""

    def see(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Take in the requests that have arrived, and return them, the latest first."""
        new: list[Request] = []
        for request in islice(reversed(waiting), _NUM_ARRIVALS):
            if request.arrival_s <= self._last_s or request.num_preemptions:
                break
            new.append(request)
        if new:
            self._last_s, self._is_new = new[0].arrival_s, True
            self._arrivals.extend(map(_arrival, reversed(new)))
        return new

    def tokens_per_s(self, now_s: float) -> float:
        """Return the prompt tokens that have arrived lately in a second; 0 while that is unknown.

        They are those that were not cached when they arrived.
        """
        arrivals = self._arrivals
        if len(arrivals) < _LEAST_ARRIVALS or now_s <= arrivals[0].arrival_s:
            return 0.0
        return sum([a.num_tokens for a in arrivals]) / (now_s - arrivals[0].arrival_s)

    def is_known_of(self, pace: Pace) -> bool:
        """Tell whether `judge` need not be called, since nobody has arrived or there is no choice.

        Of decodes that all ask for the same TPOT it is worth keeping.
        """
        if self._is_new and len(pace.tiers) < 2:
            self._is_new, self._tpot_s = False, 0.0
        return not self._is_new

    def judge(self, pace: Pace, decodes: Sequence[Request], view: SchedulerView) -> None:
        """Choose the TPOT anew if requests have arrived since it was chosen."""
        if self._is_new:
            self._is_new = False
            self._tpot_s = self._best(pace, decodes, view)

    def kept(self, pace: Pace, model: LatencyModel, slack_s: Callable[[float], float]) -> Pace:
        """Return the pace of the same decodes if those that ask for too much asked for less.

        `slack_s` tells how long it is until the first decode of at least some TPOT is due.
        """
        if self._tpot_s <= pace.tpot_s:
            return pace
        return pace.raised(self._tpot_s, model, slack_s)

    def _best(self, pace: Pace, decodes: Sequence[Request], view: SchedulerView) -> float:
        """Return the TPOT at which most of the latest arrivals would be good."""
        arrivals = self._arrivals
        tpots_s = _quantiles([t for t, _ in pace.tiers if pace.tpot_s <= t < math.inf])
        if len(arrivals) < _LEAST_ARRIVALS or len(tpots_s) < 2:
            return 0.0
        budget_tokens, rule = view.limits.max_num_batched_tokens, view.limits.deadline_rule
        long_chunks = _long_chunks(pace, view.model, budget_tokens, rule)
        spare = 0.0
        if rule is DeadlineRule.ENVELOPE:
            spare = _UNUSED_TTFT / max(_LEAST_STAY_TOKENS, stay_tokens(decodes))
        lengths = sorted(a.num_tokens for a in arrivals)
        best_share, best_s = 0.0, 0.0
        for place, tpot_s in enumerate(tpots_s):
            within = in_a_tpot(tpot_s, pace, view.model, budget_tokens)
            speed = 0.0 if within is None else within.num_tokens / tpot_s
            speed = max(speed, tokens_per_s_in_turns(tpot_s, pace.all_s, long_chunks))
            tokens = speed * (view.now_s - arrivals[0].arrival_s)
            share = _num_through(lengths, tokens) / len(lengths)
            kept = 1.0
            if tpot_s > pace.tiers[0][0]:
                num_kept = sum(a.tpot_s + spare * a.ttft_s >= tpot_s for a in arrivals)
                kept = num_kept / len(arrivals)
            if share * kept > _LEAST_GAIN * best_share:
                best_share, best_s = share * kept, tpot_s if place else 0.0
            if share == 1:
                break
        return best_s


def _arrival(request: Request) -> _Arrival:
    slo = request.slo
    return _Arrival(request.arrival_s, request.num_uncomputed_tokens, slo.tpot_s, slo.ttft_s)


def _quantiles(tpots_s: Sequence[float]) -> Sequence[float]:
    if len(tpots_s) <= _MOST_TIERS:
        return tpots_s
    last = len(tpots_s) - 1
    return [tpots_s[i * last // (_MOST_TIERS - 1)] for i in range(_MOST_TIERS)]


def _long_chunks(
    pace: Pace, model: LatencyModel, budget_tokens: int, rule: DeadlineRule
) -> Sequence[Chunk]:
    """Return the chunks that long steps may have; none if the rule counts every gap."""
    max_tokens = budget_tokens - pace.shape.num_decodes
    if rule is DeadlineRule.TBT or max_tokens <= 0:
        return ()
    return chunks_beside(model, pace.shape, pace.all_s, max_tokens)


def _num_through(lengths: Iterable[int], tokens: float) -> int:
    """Return how many prompts, the shortest first, have no more than `tokens` together."""
    num = 0
    for length in lengths:
        tokens -= length
        if tokens < 0:
            break
        num += 1
    return num
