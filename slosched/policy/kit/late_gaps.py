"""Late gaps: when decodes can afford one under the rule `tbt`, and when it lets prompts through.

Under this rule a request is good with one late gap in a hundred, however long that gap is.  On some
devices a step of one decode and a tile of a prompt takes longer than the smallest TPOT.  While a
decode with such a TPOT runs, no prompt has time beside it, but one late gap lets whole prompts
through.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from slosched.core import (
    MAX_LATE_GAP_SHARE,
    TOLERANCE_S,
    BatchShape,
    LatencyModel,
    Request,
    SchedulerView,
)
from slosched.policy.kit.pace import CHUNK_TOKENS, Pace, first_place
from slosched.policy.kit.punctual import Timed
from slosched.policy.kit.stays import Stays

_FEW = 0.1
"""Share of the requests that end with fewer tokens than a decode is taken to emit."""


def starving_tpot_s(pace: Pace, model: LatencyModel) -> float | None:
    """Return the smallest TPOT that is kept if no step that keeps it has time for a prompt.

    Returns None if the TPOT has time for a tile beside a single decode, so that prompts only wait
    until there are fewer decodes.
    """
    if pace.keeps_all or not pace.tiers:
        return None
    with_tile_s = _with_tile_s(pace.shape, model)
    if pace.tiers[0][0] >= with_tile_s:
        return None
    tpot_s = min(pace.tpot_s, _tightest_alone_s(pace, model))
    return tpot_s if tpot_s < with_tile_s else None


def num_due_soon(
    prompts: Iterable[Timed], pace: Pace, step_s: float, now_s: float, budget_tokens: int
) -> int:
    """Return how many prompts would be late if a step of decodes alone came before theirs.

    `prompts` are sorted by deadline.  Only those count that fit into a step of `budget_tokens`.
    The step of decodes alone takes at most `step_s`.
    """
    start_s = now_s + step_s + 2 * pace.all_s  # the prompts, too, run beside decodes
    num, num_tokens, prefill_s = 0, 0, 0.0
    for request, alone_s in prompts:
        prefill_s += alone_s
        num_tokens += request.num_uncomputed_tokens
        if num and num_tokens > budget_tokens:
            break
        num += request.deadline_s - prefill_s <= start_s
    return num


class LateGaps:
    """The late gaps that decodes had, and those that they can afford.

    Output lengths are not known.  A decode is taken to emit as many tokens as nine of ten requests
    do that emit more than it has so far, and no more than it has while few requests have ended.
    """

    def __init__(self, stays: Stays) -> None:
        self._stays = stays
        self._counted: dict[str, tuple[int, int]] = {}
        """By request id: the tokens whose gaps were counted, and how many of the gaps were late."""

    def limits_s(
        self, decodes: Iterable[Request], tpot_s: float, view: SchedulerView, margin: float
    ) -> list[float]:
        """Return the longest times of steps that cost no decode its SLO, one, two, and so on.

        Decodes whose TPOT is below `tpot_s` do not count, nor do those without a TPOT and those
        that have had too many late gaps.  A step that costs n decodes their SLO ends `margin` of
        its TPOT before the next one is due that can afford no late gap.  The last limit is
        infinite.  O(n log n).
        """
        limits_s = sorted(
            request.deadline_s - view.now_s - margin * own_s
            for request, num_left in self._left(decodes)
            if tpot_s <= (own_s := request.slo.tpot_s) < math.inf and num_left == 0
        )
        return [*limits_s, math.inf]

    def _left(self, decodes: Iterable[Request]) -> Iterator[tuple[Request, int]]:
        """Yield each decode and the late gaps it can afford: below 0 if it has had too many."""
        lengths = self._stays.lengths()
        counted, self._counted = self._counted, {}
        for request in decodes:
            num_tokens, num_late = counted.get(request.request_id, (1, 0))
            num_emitted = len(request.token_times_s) - request.num_output_placeholders
            num_late += _num_late(request, num_tokens, num_emitted)
            self._counted[request.request_id] = num_emitted, num_late
            if request.num_output_placeholders:  # the running step may take longer than foreseen
                num_late += _num_late(request, num_emitted)
            yield request, _num_allowed(_num_expected(request, lengths)) - num_late


def _tightest_alone_s(pace: Pace, model: LatencyModel) -> float:
    """Return the smallest TPOT that decodes keep in steps without prompts; infinite if none is."""
    tpots_s = [tpot_s for tpot_s, _ in pace.tiers]
    at = first_place(lambda tpot_s: model.predict(pace.due_within(tpot_s)) < tpot_s, tpots_s)
    return tpots_s[at] if at < len(tpots_s) else math.inf


def _with_tile_s(decodes: BatchShape, model: LatencyModel) -> float:
    """Return the predicted time of a step of one of the decodes and a tile of a prompt."""
    step = BatchShape()
    step.add_decodes([decodes.decode_context_tokens // decodes.num_decodes])
    step.add(CHUNK_TOKENS, 0)
    return model.predict(step)


def _num_expected(request: Request, lengths: Sequence[int]) -> int:
    """Return how many tokens a decode most probably emits at least; `lengths` are sorted."""
    num_tokens = request.num_output_tokens
    at = bisect_right(lengths, num_tokens)
    if at < len(lengths):
        num_tokens = lengths[at + int(_FEW * (len(lengths) - at))]
    return min(num_tokens, request.max_tokens)


def _num_allowed(num_tokens: int) -> int:
    """Return how many of the gaps between so many tokens may be late."""
    return math.floor(MAX_LATE_GAP_SHARE * (num_tokens - 1))


def _num_late(request: Request, num_counted: int, num_tokens: int | None = None) -> int:
    """Return how many gaps are late, of those that end with a token after `num_counted`.

    Only the first `num_tokens` are looked at.  Default: all.
    """
    most_s = request.slo.tpot_s + TOLERANCE_S
    times_s = request.token_times_s[max(0, num_counted - 1) : num_tokens]
    return sum(b - a > most_s for a, b in pairwise(times_s))
