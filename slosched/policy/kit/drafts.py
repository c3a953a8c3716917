"""The number of draft tokens that pays: more work in a second than without them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from slosched.core import BatchShape, DraftOffer

_LEAST_GAIN = 1.02
"""Factor by which drafts must speed up the work, since their acceptance is an estimate."""
_GROWTH = 1.5
"""Factor between the numbers of drafts that are tried, so that they are few."""


def drafts_that_pay(
    offers: Sequence[DraftOffer],
    shape: BatchShape,
    predict: Callable[[BatchShape], float],
    limit_s: float = math.inf,
) -> list[int]:
    """Return how many draft tokens of each offer a step of this shape should verify.

    The drafts are ranked by the chance that they are accepted: for the k-th of an offer that is the
    k-th power of its acceptance.  For several numbers of best drafts the latency model predicts the
    step's time.  The step does the work for which it would need `shape` without drafts, and each
    accepted draft saves what a decode adds to such a step.  In a step of decodes alone that is the
    step's time over the number of decodes.  Beside a long chunk it is the little that one decode
    more takes.  The number at which most of this work is done per second is taken, or none if it
    gains less than 2 %.  No step becomes longer than `limit_s`.  O(n log n), and a prediction for
    each tried number.
    """
    ranked = _ranked(offers)
    plain_s, saved_s = predict(shape), _saved_s(shape, predict)
    best, most_work, num_tried, value = 0, _LEAST_GAIN, 0, 0.0
    longer = shape.copy()
    while num_tried < len(ranked):
        following = min(max(num_tried + 1, int(_GROWTH * num_tried)), len(ranked))
        value += sum([chance for chance, _ in ranked[num_tried:following]])
        longer.lengthen_decodes(following - num_tried)
        num_tried = following
        step_s = predict(longer)
        if step_s > limit_s:
            break
        work = (plain_s + value * saved_s) / step_s
        if work > most_work:
            best, most_work = num_tried, work
    chosen = [0] * len(offers)
    for _, place in ranked[:best]:
        chosen[place] += 1
    return chosen


def _ranked(offers: Sequence[DraftOffer]) -> list[tuple[float, int]]:
    """Return the chance of each draft token and the place of its offer, the best first."""
    ranked = []
    for place, (_, max_tokens, acceptance) in enumerate(offers):
        chance = 1.0
        for _ in range(max_tokens):
            chance *= acceptance
            ranked.append((chance, place))
    ranked.sort(key=lambda draft: -draft[0])
    return ranked


def _saved_s(shape: BatchShape, predict: Callable[[BatchShape], float]) -> float:
    """Return the time by which a step is shorter with one decode less, on average over all."""
    rest = shape.copy()
    rest.num_decodes = rest.decode_context_tokens = rest.max_decode_context_tokens = 0
    return (predict(shape) - predict(rest)) / shape.num_decodes
