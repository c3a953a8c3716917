"""Steps longer than a TPOT: when they let prompts go faster, and when decodes can afford one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slosched.core import DeadlineRule, LatencyModel, Request, SchedulerView
from slosched.policy.kit.chunks import Chunk, chunk_beside, chunks_beside, in_a_tpot, largest_within
from slosched.policy.kit.lost import lost_due_by, num_lost
from slosched.policy.kit.pace import Pace, first_place
from slosched.policy.kit.punctual import Timed

_SPARE = 0.02
"""Share of the TPOT by which the mean of the steps stays below it."""
_LEAST_GAIN = 1.1
"""Factor by which prompts must go faster, since they wait while decodes get ahead."""
_LEAST_GAIN_OF_SOME = 1.5
"""The same factor where prompts go faster only if some decodes are left out between long steps."""
_LOOSE = 1.5
"""Multiple of the TPOT kept from which on a decode is left out of steps while it is ahead."""


class LongSteps(NamedTuple):
    """Steps longer than a TPOT, in turn with steps of decodes alone that make up for them.

    In a long step a decode costs next to nothing, between them each makes all others wait.
    """

    tpot_s: float
    """Smallest TPOT that the mean of the steps keeps."""
    chunk: Chunk
    """The chunk of a long step, of all the one that adds least time for each token."""
    between_s: float
    """Predicted time of a step of the decodes that are due within the TPOT."""

    def first_slack_s(self, decodes: Sequence[Request], pace: Pace, view: SchedulerView) -> float:
        """Return the time until the first of `decodes`, sorted by deadline, that counts is due.

        Those do not count whose TPOT is not kept, nor those that would be late even in a step of
        decodes alone: they catch up in the steps between the long ones.  Under `envelope`, where
        none catches up, only those that are late already do not count.
        """
        is_envelope = view.limits.deadline_rule is DeadlineRule.ENVELOPE
        least_s = 0.0 if is_envelope else pace.all_s
        others = decodes[num_lost(decodes, view) :]
        slacks_s = (r.deadline_s - view.now_s for r in others if r.slo.tpot_s >= self.tpot_s)
        return next((slack_s for slack_s in slacks_s if slack_s >= least_s), math.inf)

    def limit_s(
        self,
        decodes: Sequence[Request],
        prompts: Iterable[Timed],
        pace: Pace,
        view: SchedulerView,
        margin: float,
    ) -> float | None:
        """Return the time limit of a long step now; None if decodes cannot afford one yet.

        It ends `margin` of the TPOT before the first of `decodes`, sorted by deadline, is due.
        """
        slack_s = self.first_slack_s(decodes, pace, view) - margin * self.tpot_s
        step_s = self._next_step_s(prompts, pace, view.model)
        if step_s > max(slack_s, (1 - margin) * self.tpot_s):
            return None
        return max(slack_s, math.nextafter(step_s, math.inf))

    def between(
        self,
        decodes: Sequence[Request],
        prompts: Iterable[Timed],
        pace: Pace,
        view: SchedulerView,
        margin: float,
    ) -> Sequence[Request]:
        """Return those of `decodes`, sorted by deadline, that a step between two long ones holds.

        The fewer they are, the sooner they are ahead by a long step.  Those that ask for much more
        than the TPOT need no token while they are ahead by one.  Lost decodes get a token as often
        as the largest TPOT of the others asks for.
        """
        num = num_lost(decodes, view)
        lost, others = decodes[:num], decodes[num:]
        end_s = view.now_s + pace.all_s
        until_s = end_s + self._next_step_s(prompts, pace, view.model) + margin * self.tpot_s
        loose_s = _LOOSE * self.tpot_s
        due = [r for r in others if r.slo.tpot_s < loose_s or r.deadline_s < until_s]
        return [*due, *lost_due_by(lost, others, end_s)] or decodes

    def _next_step_s(self, prompts: Iterable[Timed], pace: Pace, model: LatencyModel) -> float:
        """Return the time of the next long step."""
        num_left = sum([request.num_uncomputed_tokens for request, _ in prompts])
        return self.chunk_of(num_left, pace, model).step_s

    def chunk_of(self, num_tokens: int, pace: Pace, model: LatencyModel) -> Chunk:
        """Return the chunk of a long step when `num_tokens` tokens of prompts are left."""
        if num_tokens >= self.chunk.num_tokens:
            return self.chunk
        return chunk_beside(model, pace.shape, pace.all_s, num_tokens)


def tokens_per_s_in_turns(tpot_s: float, between_s: float, chunks: Sequence[Chunk]) -> float:
    """Return the prompt tokens per second in long steps and steps of decodes alone, in turn.

    `chunks` are those that a long step may have; a step of decodes alone takes `between_s`.  The
    steps take `tpot_s` on average.  Returns 0 if no step with such a chunk is longer, or if decodes
    leave no time.
    """
    cheapest = _cheapest_beyond(tpot_s, chunks)
    share = 1 - between_s / ((1 - _SPARE) * tpot_s)
    if cheapest is None or share <= 0:
        return 0.0
    if not cheapest.token_s:  # The step is longer by the decodes that are left out between.
        return share * cheapest.num_tokens / (cheapest.step_s - between_s)
    return share / cheapest.token_s


def _cheapest_beyond(tpot_s: float, chunks: Sequence[Chunk]) -> Chunk | None:
    """Return the chunk that adds least time for each token, of those in steps beyond a TPOT.

    Of those that add none, which there are where a device pads its steps, it is the longest.
    """
    longer = [chunk for chunk in chunks if chunk.step_s > tpot_s]
    if free := [chunk for chunk in longer if not chunk.token_s]:
        return free[-1]
    return min(longer, key=lambda chunk: chunk.token_s, default=None)


def long_steps(
    pace: Pace, model: LatencyModel, budget_tokens: int, min_share: float
) -> LongSteps | None:
    """Return the long steps in which prompts go faster than in steps within a TPOT; None if none.

    While steps take a TPOT on average, the time that decodes leave goes to prompts, and the chunk
    with the least `token_s` makes most of it.  Where a step's time grows in proportion to its
    tokens, a long chunk gains nothing.  Where most of the time is spent on the first few tokens, as
    in a mixture of experts, prompts go several times as fast in long chunks.

    The TPOT is the smallest of the decodes' at which prompts still go at the share `min_share` of
    the speed that they would have if no decode counted, or else the largest.
    """
    max_tokens = budget_tokens - pace.shape.num_decodes
    if not pace.tiers or max_tokens <= 0:
        return None
    full = chunk_beside(model, pace.shape, pace.all_s, max_tokens)
    if full.step_s <= pace.tiers[0][0]:
        return None
    chunks = chunks_beside(model, pace.shape, pace.all_s, max_tokens)
    shorter = [tpot_s for tpot_s, _ in pace.tiers if tpot_s < full.step_s]
    least = min_share * full.num_tokens / full.step_s

    def between_s(tpot_s: float) -> float:
        return model.predict(pace.due_within(tpot_s))

    def in_turns(tpot_s: float) -> float:
        return tokens_per_s_in_turns(tpot_s, between_s(tpot_s), chunks)

    def within(tpot_s: float) -> float:
        if tpot_s >= pace.tiers[-1][0]:  # nearly always: all decodes are due
            chunk = largest_within(chunks, pace.all_s, tpot_s)
        else:
            chunk = in_a_tpot(tpot_s, pace, model, budget_tokens)
        return 0.0 if chunk is None else chunk.num_tokens / tpot_s

    def is_fast(tpot_s: float) -> bool:
        return in_turns(tpot_s) >= least or within(tpot_s) >= least

    at = first_place(is_fast, shorter)
    if at == len(shorter):
        if len(shorter) < len(pace.tiers):
            return None
        at -= 1
    tpot_s = shorter[at]
    with_all = tokens_per_s_in_turns(tpot_s, pace.all_s, chunks)
    in_tpots = within(tpot_s)
    if with_all <= _LEAST_GAIN * in_tpots and in_turns(tpot_s) <= _LEAST_GAIN_OF_SOME * in_tpots:
        return None
    cheapest = _cheapest_beyond(tpot_s, chunks)
    assert cheapest is not None, "the full step is longer"
    return LongSteps(tpot_s, cheapest, between_s(tpot_s))
