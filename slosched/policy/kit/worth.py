"""Which of many TPOTs to keep while not all prompts can be in time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from slosched.core import DeadlineRule, LatencyModel, Request, SchedulerView
from slosched.policy.kit.arrivals import Arrivals, num_through
from slosched.policy.kit.chunks import Chunk, chunks_beside, in_a_tpot
from slosched.policy.kit.long_steps import tokens_per_s_in_turns
from slosched.policy.kit.pace import Pace, stay_tokens
from slosched.policy.kit.unkeepable import Kept

_MOST_TIERS = 8
"""TPOTs that are weighed; of more, so many quantiles are, and then some beside the best."""
_LEAST_GAIN = 1.02
"""Factor by which more requests must be good with a larger TPOT."""
_UNUSED_TTFT = 0.9
"""Share of a TTFT that is left when the first token comes, as a guess.  Under the rule `envelope`
the tokens after it have that time, too."""
_LEAST_STAY_TOKENS = 20.0
"""Least number of tokens that this time is divided among."""


class Worth:
    """The smallest TPOT that is worth keeping, judged anew whenever a request arrives.

    The smaller the TPOT that steps keep, the fewer prompt tokens go through; the larger it is, the
    more requests ask for less.  The latest arrivals tell how many tokens come in a second and which
    TPOTs they ask for.  The most requests are good at the TPOT with the largest product of two
    shares: prompts that go through, the shortest first, and requests that ask for this TPOT or a
    larger one.

    How many tokens go through in the long run is asked first (`Steady`).  At that rate a step just
    has time for its prompts and decodes, so that the decodes of now tell too little: there may be a
    few more than the rate allows, and then a smaller TPOT seems to leave no time for prompts.  If
    the best TPOT is one that the decodes of now allow, or a smaller one, it is held.  Prompts then
    wait until there are few enough decodes for it.

    Otherwise, and while too few requests have ended, the latency model tells how many tokens go
    through beside the decodes of now, in steps no longer than a TPOT or in turns of long and short
    ones.  The best TPOT of those that can be kept now is kept, or that of the long run if it is
    larger: while a smaller one is kept and prompts are turned away, there are few decodes, so that
    it seems to cost nothing.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._num_seen = 0
        """Arrivals of which all were taken into account."""
        self.least = Kept()
        """The smallest TPOT that is kept."""
        self._is_held = False
        """Whether it is kept even if there are too many decodes for it now."""

    def is_known_of(self, pace: Pace) -> bool:
        """Tell whether `judge` need not be called, since nobody has arrived or there is no choice.

        A TPOT for which all decodes and the latest arrivals ask is worth keeping.
        """
        num_seen = self._arrivals.num_seen
        if num_seen == self._num_seen:
            return True
        if len({t for t, _ in pace.tiers}.union(self._arrivals.tpots_s())) > 1:
            return False
        self._num_seen, self._is_held, self.least = num_seen, False, Kept()
        return True

    def judge(self, pace: Pace, decodes: Sequence[Request], view: SchedulerView) -> None:
        """Choose the TPOT anew if requests have arrived since it was chosen."""
        num_seen = self._arrivals.num_seen
        if num_seen == self._num_seen:
            return
        self._num_seen, self._is_held, self.least = num_seen, False, Kept()
        if not self._arrivals.span_s(view.now_s):
            return
        spare = 0.0
        if view.limits.deadline_rule is DeadlineRule.ENVELOPE:
            spare = _UNUSED_TTFT / max(_LEAST_STAY_TOKENS, stay_tokens(decodes))
        least_s = self._best_in_the_long_run(view, spare)
        self._is_held = 0 < least_s <= pace.tpot_s
        if not self._is_held:
            least_s = max(least_s, self._best_beside(pace, view, spare))
        self.least = Kept(least_s, spare)

    def kept(self, pace: Pace, model: LatencyModel, slack_s: Callable[[float], float]) -> Pace:
        """Return the pace of the same decodes if it keeps the TPOT that is worth it.

        Decodes that ask for a smaller one then count as if they asked for that.  `slack_s` tells
        how long it is until the first decode of at least some TPOT is due.
        """
        least_s = self.least.tpot_s
        if least_s > pace.tpot_s:
            return pace.raised(least_s, model, slack_s)
        if self._is_held:
            held_s = next((t for t, _ in pace.tiers if t >= least_s), math.inf)
            if held_s < pace.tpot_s:
                return pace.lowered(held_s, model, slack_s)
        return pace

    def _best_in_the_long_run(self, view: SchedulerView, spare: float) -> float:
        """Return the TPOT at which most are good in a steady state; 0 if that is not known."""
        steady = self._arrivals.steady(view)
        if steady is None:
            return 0.0
        return self._best(self._arrivals.tpots_s(), steady.tokens_per_s, view.now_s, spare)

    def _best_beside(self, pace: Pace, view: SchedulerView, spare: float) -> float:
        """Return the TPOT, of those that can be kept now, at which most requests are good.

        It is 0 if that is the smallest of them.
        """
        tpots_s = [t for t, _ in pace.tiers if pace.tpot_s <= t < math.inf]
        if len(tpots_s) < 2:
            return 0.0
        budget_tokens, rule = view.limits.max_num_batched_tokens, view.limits.deadline_rule
        long_chunks = _long_chunks(pace, view.model, budget_tokens, rule)

        def tokens_per_s(tpot_s: float) -> float:
            within = in_a_tpot(tpot_s, pace, view.model, budget_tokens)
            speed = 0.0 if within is None else within.num_tokens / tpot_s
            return max(speed, tokens_per_s_in_turns(tpot_s, pace.all_s, long_chunks))

        best_s = self._best(tpots_s, tokens_per_s, view.now_s, spare, pace.tiers[0][0])
        return 0.0 if best_s == tpots_s[0] else best_s

    def _best(
        self,
        tpots_s: Sequence[float],
        tokens_per_s: Callable[[float], float],
        now_s: float,
        spare: float,
        all_at_s: float = 0.0,
    ) -> float:
        """Return the one of `tpots_s`, sorted, at which most of the latest arrivals are good.

        `tokens_per_s` tells how many prompt tokens go through.  At `all_at_s` no arrival is late
        for its TPOT.  Returns 0 if none is good at any.
        """
        lengths, span_s = self._arrivals.lengths(), self._arrivals.span_s(now_s)

        def shares(place: int) -> tuple[float, float]:
            """Return the share of prompts that go through, and the share that is good."""
            tpot_s = tpots_s[place]
            through = num_through(lengths, tokens_per_s(tpot_s) * span_s) / len(lengths)
            kept = self._share_kept(Kept(tpot_s, spare)) if tpot_s > all_at_s else 1.0
            return through, through * kept

        best_share, low, high, before = 0.0, 0, 0, 0
        for place in _spread(len(tpots_s)):
            through, good = shares(place)
            if good > _LEAST_GAIN * best_share:
                best_share, low, high = good, before, place
            if through == 1:
                break
            before = place
        while high - low > 1:  # Those that were left out ask for less, and may go through as well.
            middle = (low + high) // 2
            _, good = shares(middle)
            if good >= best_share:
                best_share, high = good, middle
            else:
                low = middle
        return tpots_s[high] if best_share else 0.0

    def _share_kept(self, kept: Kept) -> float:
        """Return the share of the latest arrivals whose TPOT is kept."""
        latest = self._arrivals.latest
        return sum(kept.includes(a.tpot_s, a.ttft_s) for a in latest) / len(latest)


def _spread(num: int) -> Sequence[int]:
    """Return at most a few places of so many, from the first to the last."""
    if num <= _MOST_TIERS:
        return range(num)
    return [i * (num - 1) // (_MOST_TIERS - 1) for i in range(_MOST_TIERS)]


def _long_chunks(
    pace: Pace, model: LatencyModel, budget_tokens: int, rule: DeadlineRule
) -> Sequence[Chunk]:
    """Return the chunks that long steps may have; none if the rule counts every gap."""
    max_tokens = budget_tokens - pace.shape.num_decodes
    if rule is DeadlineRule.TBT or max_tokens <= 0:
        return ()
    return chunks_beside(model, pace.shape, pace.all_s, max_tokens)
