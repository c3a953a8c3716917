"""Fluidity (Etalon, 2407.07000): how smoothly the tokens reach a reader of steady pace.

An early token banks its slack for later ones.  A late token is a miss; the reader starts anew from
it, with no slack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slosched.core import TOLERANCE_S, DeadlineRule
from slosched.metrics.columns import FloatArray, RequestColumns
from slosched.metrics.promises import token_due_s
from slosched.metrics.records import RequestRecord

FLUID_INDEX = 0.9
"""Least fluidity index of a request that counts as served fluidly."""


def fluidity_indices(columns: RequestColumns) -> FloatArray:
    """Return the share of each request's tokens that came in time, shape (n,); NaN without a token.

    With e_j the slack of token j under the rule `envelope`, the slack that is carried is s_j =
    max(0, s_(j-1) + e_j - e_(j-1)), which is e_j above its lowest value so far.  So a token is a
    miss exactly if e_j is negative and lower than before.
    """
    early_s = token_due_s(columns, DeadlineRule.ENVELOPE)
    early_s -= columns.token_s
    lowest_s = np.minimum(early_s, 0.0)
    ends = columns.first_token + columns.num_output_tokens
    for first, end in zip(columns.first_token.tolist(), ends.tolist(), strict=True):
        np.minimum.accumulate(lowest_s[first:end], out=lowest_s[first:end])
    lowest_s -= TOLERANCE_S
    is_hit = np.empty(len(early_s), dtype=np.bool_)
    is_hit[1:] = early_s[1:] >= lowest_s[:-1]
    starts = columns.first_token[columns.has_begun]
    is_hit[starts] = early_s[starts] >= -TOLERANCE_S
    with np.errstate(invalid="ignore"):  # 0 / 0 where no token came out
        return columns.count(is_hit) / columns.num_output_tokens


def fluid_token_rate(
    records: Sequence[RequestRecord], share: float = 0.99, index: float = FLUID_INDEX
) -> float:
    """Return the highest tokens/s at which `share` of the requests have a fluidity >= `index`.

    The reader's pace is the same for all requests and replaces the promised TPOT; the promised TTFT
    stays.  Returns 0 if no pace is slow enough, as where too many requests got no token.
    """
    columns = RequestColumns.of(records)

    def is_fluid(tokens_per_s: float) -> bool:
        pace_s = np.full_like(columns.promised_tpot_s, 1 / tokens_per_s)
        indices = fluidity_indices(replace(columns, promised_tpot_s=pace_s))
        return bool(np.count_nonzero(indices >= index) >= share * len(records))

    low, high = 1e-3, 1e5
    if not is_fluid(low):
        return 0.0
    if is_fluid(high):
        return math.inf
    while high > 1.0005 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_fluid(middle) else (low, middle)
    return low
