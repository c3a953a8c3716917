"""The SLOs that were met, by all requests of a replay or by a single one.

Comparisons with the time of an SLO allow `TOLERANCE_S`, so that a token due at 0.1 + 0.2 and out at
0.3 is on time. The tolerance is far below anything that a clock or a user can notice.
"""

from __future__ import annotations

import numpy as np

from slosched.core import MAX_LATE_GAP_SHARE, TOLERANCE_S, DeadlineRule
from slosched.metrics.columns import BoolArray, FloatArray, RequestColumns
from slosched.metrics.records import RequestRecord


def token_due_s(columns: RequestColumns, rule: DeadlineRule) -> FloatArray:
    """Return when each emitted token was due, shape (t,), by `DeadlineRule.next_deadline_s`.

    It computes in place, since the arrays of some million tokens are large.
    """
    first_due_s = columns.arrival_s + columns.promised_ttft_s
    has_begun = columns.has_begun
    starts = columns.first_token[has_begun]
    if rule is DeadlineRule.TBT:
        due_s = columns.per_token(columns.promised_tpot_s)
        due_s[1:] += columns.token_s[:-1]
    else:
        anchor_s = first_due_s.copy()
        if rule is DeadlineRule.MEAN_TPOT:
            anchor_s[has_begun] = columns.token_s[starts]
        due_s = np.arange(len(columns.token_s), dtype=np.float64)
        due_s -= columns.per_token(columns.first_token)
        with np.errstate(invalid="ignore"):  # 0 * inf, only at first tokens
            due_s *= columns.per_token(columns.promised_tpot_s)
        due_s += columns.per_token(anchor_s)
    due_s[starts] = first_due_s[has_begun]
    return due_s


def tokens_on_time(columns: RequestColumns, rule: DeadlineRule) -> BoolArray:
    """Tell which tokens came out by their deadline, shape (t,)."""
    due_s = token_due_s(columns, rule)
    due_s += TOLERANCE_S
    return columns.token_s <= due_s


def late_gaps(columns: RequestColumns) -> BoolArray:
    """Tell which tokens came more than TPOT after the token before, shape (t,).

    A first token is never late in this sense.
    """
    return columns.gap_s > columns.per_token(columns.promised_tpot_s + TOLERANCE_S)


def ttft_kept(columns: RequestColumns) -> BoolArray:
    """Tell which requests got their first token in time, shape (n,)."""
    return columns.ttft_s <= columns.promised_ttft_s + TOLERANCE_S


def tokens_kept(columns: RequestColumns, rule: DeadlineRule) -> BoolArray:
    """Tell which requests kept their TPOT, as `rule` reads it, shape (n,).

    `mean_tpot`: TPOT <= tpot.  `envelope`: every t_j <= a + ttft + j * tpot.  `tbt`: at most
    `MAX_LATE_GAP_SHARE` of the gaps exceed tpot.  False where no token came out.
    """
    if rule is DeadlineRule.MEAN_TPOT:
        return columns.tpot_s <= columns.promised_tpot_s + TOLERANCE_S
    is_envelope = rule is DeadlineRule.ENVELOPE
    late = ~tokens_on_time(columns, rule) if is_envelope else late_gaps(columns)
    allowed_share = 0.0 if is_envelope else MAX_LATE_GAP_SHARE
    allowed = allowed_share * (columns.num_output_tokens - 1)
    return columns.has_begun & (columns.count(late) <= allowed)


def e2e_kept(columns: RequestColumns) -> BoolArray:
    """Tell which requests had no E2E promised, or got their last token in it, shape (n,)."""
    is_free = np.isinf(columns.promised_e2e_s)
    return is_free | (columns.e2e_s <= columns.promised_e2e_s + TOLERANCE_S)


def good_requests(columns: RequestColumns, rule: DeadlineRule) -> BoolArray:
    """Tell which requests finished and kept their whole SLO, shape (n,).

    One that was relegated had to do without it, and is not good however soon it was served.
    """
    is_served = columns.is_finished & ~columns.is_relegated
    return is_served & ttft_kept(columns) & e2e_kept(columns) & tokens_kept(columns, rule)


def met_ttft(record: RequestRecord) -> bool:
    """Tell whether the first token came out in time."""
    return bool(ttft_kept(RequestColumns.of([record]))[0])


def met_tokens(record: RequestRecord, rule: DeadlineRule) -> bool:
    """Tell whether the tokens that came out kept the TPOT, see `tokens_kept`."""
    return bool(tokens_kept(RequestColumns.of([record]), rule)[0])


def met_e2e(record: RequestRecord) -> bool:
    """Tell whether no E2E was promised, or the last token came out within it."""
    return bool(e2e_kept(RequestColumns.of([record]))[0])


def is_good(record: RequestRecord, rule: DeadlineRule) -> bool:
    """Tell whether the request finished and kept its whole SLO."""
    return bool(good_requests(RequestColumns.of([record]), rule)[0])
