"""The number of draft tokens that pays: more work in a second than without them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from slosched.core import BatchShape, DraftOffer, SchedulerOutput, SchedulerView
from slosched.policy.kit.lengths import Floats

Ints = npt.NDArray[np.int64]

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
    chances, places = _ranked(offers)
    plain_s, saved_s = predict(shape), _saved_s(shape, predict)
    expected = chances.cumsum().tolist()
    best, most_work, num_tried = 0, _LEAST_GAIN, 0
    longer = shape.copy()
    while num_tried < len(expected):
        following = min(max(num_tried + 1, int(_GROWTH * num_tried)), len(expected))
        longer.lengthen_decodes(following - num_tried)
        num_tried = following
        step_s = predict(longer)
        if step_s > limit_s:
            break
        work = (plain_s + expected[num_tried - 1] * saved_s) / step_s
        if work > most_work:
            best, most_work = num_tried, work
    chosen: list[int] = np.bincount(places[:best], minlength=len(offers)).tolist()
    return chosen


def drafts_in_time(
    offers: Sequence[DraftOffer], output: SchedulerOutput, view: SchedulerView
) -> list[int]:
    """Return the drafts that pay in the step `output`, if it makes no request late."""
    assert output.shape is not None
    predict, scheduled = view.model.predict, output.num_scheduled_tokens
    now_s = view.now_s
    due_s = [request.deadline_s for request in view.running]
    # It may start prompts, which are due as well.
    started = (r.deadline_s for r in view.waiting if r.request_id in scheduled)
    due_s += islice(started, len(scheduled) - len(offers))
    end_s = now_s + predict(output.shape)
    limit_s = min([deadline_s for deadline_s in due_s if deadline_s > end_s], default=math.inf)
    return drafts_that_pay(offers, output.shape, predict, limit_s - now_s)


def _ranked(offers: Sequence[DraftOffer]) -> tuple[Floats, Ints]:
    """Return the chance of each draft token and the place of its offer, the best first."""
    _, limits, acceptances = zip(*offers, strict=True)
    table = np.repeat(np.array(acceptances)[:, None], max(limits), axis=1)
    chances = np.multiply.accumulate(table, axis=1)
    is_offered = np.arange(table.shape[1]) < np.array(limits)[:, None]
    chances, places = chances[is_offered], is_offered.nonzero()[0]
    order = np.argsort(-chances, kind="stable")
    return chances[order], places[order]


def _saved_s(shape: BatchShape, predict: Callable[[BatchShape], float]) -> float:
    """Return the time by which a step is shorter with one decode less, on average over all."""
    rest = shape.copy()
    rest.num_decodes = rest.decode_context_tokens = rest.max_decode_context_tokens = 0
    return (predict(shape) - predict(rest)) / shape.num_decodes
