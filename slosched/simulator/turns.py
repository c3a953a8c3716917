"""Whether the traffic has turned within a window, and since when."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slosched.policy.portfolio.question import PastRequest

_SPANS_S = (5.0, 10.0, 20.0)
"""Times before the window's end at which the traffic may have turned."""
_LEAST = 16
"""Least number of requests before and after a turn."""
_LEVEL = 1e-7
"""Probability below which two samples of one traffic would differ so much."""
_WARM_UP = 0.25
"""Share of the window's time that fills the replica, where the traffic has not turned."""


def first_alike(requests: Sequence[PastRequest]) -> tuple[int, bool]:
    """Return the index of the first request to judge, and whether the traffic turned there.

    The traffic turns where prompt lengths or promises before and after differ by the test of
    Kolmogorov and Smirnov.  Without a turn the first quarter of the time is not judged, as the
    replays begin in the state that the planning candidate had brought about.
    """
    arrivals_s = np.array([r.arrival_s for r in requests])
    num_before = int(np.searchsorted(arrivals_s, 0.0))
    columns = (
        np.array([r.num_prompt_tokens for r in requests], dtype=np.float64),
        np.array([r.slo.ttft_s for r in requests]),
        np.array([r.slo.tpot_s for r in requests]),
    )
    end_s, likeliest = arrivals_s[-1], (_LEVEL, 0)
    for span_s in _SPANS_S:
        index = int(np.searchsorted(arrivals_s, end_s - span_s))
        if min(index - num_before, len(requests) - index) >= _LEAST:
            level = min(_chance(column[num_before:index], column[index:]) for column in columns)
            likeliest = min(likeliest, (level, index))
    if likeliest[1]:
        return likeliest[1], True
    return int(np.searchsorted(arrivals_s, _WARM_UP * end_s)), False


def _chance(before: np.typing.NDArray[np.float64], after: np.typing.NDArray[np.float64]) -> float:
    """Return the probability that two samples of one distribution differ at least so much."""
    from scipy import stats  # slow to import

    return float(stats.ks_2samp(before, after, method="asymp").pvalue)
