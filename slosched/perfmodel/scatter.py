"""How single steps scatter about what a latency model predicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from slosched.perfmodel.measurement import Measurement, Part, Profile

_SIGMA_PER_ERROR = math.sqrt(math.pi / 2)
"""The standard deviation of a normal distribution over its mean absolute error."""


def scatter(profile: Profile, steps: Sequence[Measurement], predicted_s: Sequence[float]) -> float:
    """Return sigma of log(measured / predicted) over single steps; 0 if it cannot be known.

    `steps` are merged from the rows of `profile`, and `predicted_s` are predictions for them by
    fits that did not see them.  The mean error stands for sigma, since a few stalled steps hardly
    move it.  A profile in which no batch was run twice and nothing was recorded, as one composed
    from tables, does not show single steps.
    """
    if not profile.has_single_steps:
        return 0.0
    predicted = {
        (step.chunks, step.num_swapped_blocks): seconds
        for step, seconds in zip(steps, predicted_s, strict=True)
        if seconds > 0
    }
    errors = [
        abs(math.log(row.seconds / predicted[row.chunks, row.num_swapped_blocks]))
        for row in profile.measurements
        if row.part is Part.STEP and (row.chunks, row.num_swapped_blocks) in predicted
    ]
    return _SIGMA_PER_ERROR * statistics.fmean(errors) if errors else 0.0
