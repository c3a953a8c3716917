"""The cost of a disturbance: attainment lost on the same requests, and how it was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from experiments.robustness.kinds import num_warm_up
from slosched.evaluate.capacity import Outcomes
from slosched.evaluate.capacity.windows import blocks_of
from slosched.evaluate.statistics import NUM_REPLICATES, block_weights, interval
from slosched.workload import Trace

BoolArray = npt.NDArray[np.bool_]

_SEED = 0


class Compared(NamedTuple):
    """One window, played undisturbed and disturbed."""

    window: Trace
    before: Outcomes
    after: Outcomes


class Loss(NamedTuple):
    """A loss in points of attainment, hundredths of the requests that count; positive is worse."""

    undisturbed: float
    """Attainment before the disturbance, as a share."""
    loss_points: float
    low_points: float
    high_points: float
    """The 95 % interval of the loss, paired: the same requests before and after."""
    rejected_points: float
    first_late_points: float
    tokens_late_points: float
    """Increase of this and the two ways above to miss an SLO, in the same points."""


class _Fates(NamedTuple):
    """The outcomes of a replay's requests; each request has exactly one of them."""

    good: BoolArray
    rejected: BoolArray
    first_late: BoolArray
    tokens_late: BoolArray


def loss(compared: Sequence[Compared]) -> Loss:
    """Return the loss over all windows; windows and blocks of requests in them are resampled."""
    lost, num, seed_of = [], [], []
    before, after = np.zeros(4), np.zeros(4)
    for seed, one in enumerate(compared):
        fates = [_fates(one.window, outcomes) for outcomes in (one.before, one.after)]
        blocks = blocks_of(one.window)[num_warm_up(one.window) :]
        each = fates[0].good.astype(np.float64) - fates[1].good
        for block in np.unique(blocks):
            lost.append(float(each[blocks == block].sum()))
            num.append(float((blocks == block).sum()))
            seed_of.append(seed)
        before += [fate.sum() for fate in fates[0]]
        after += [fate.sum() for fate in fates[1]]
    weights = block_weights(np.array(seed_of), NUM_REPLICATES, _SEED)
    worlds = 100 * (weights @ np.array(lost)) / np.maximum(weights @ np.array(num), 1.0)
    estimate = 100 * sum(lost) / sum(num)
    found = interval(worlds, estimate, len(compared))
    more = 100 * (after - before) / sum(num)
    undisturbed = float(before[0] / sum(num))
    low = max(found.low, -100 * (1 - undisturbed))  # attainment cannot exceed 100 %
    high = min(found.high, 100 * undisturbed)
    return Loss(undisturbed, estimate, low, high, *(float(m) for m in more[1:]))


def _fates(window: Trace, outcomes: Outcomes) -> _Fates:
    """Return the outcomes of the requests that count."""
    counted = slice(num_warm_up(window), None)
    requests = outcomes.requests[counted]
    due_s = np.array([r.slo.ttft_s for r in window.requests[counted]])
    good, finished = requests["good"], requests["finished"]
    first_late = finished & ~good & (requests["ttft_s"] > due_s)
    return _Fates(good, ~finished, first_late, finished & ~good & ~first_late)
