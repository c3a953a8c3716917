"""The slack of the most urgent request over a replay's time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slosched.core import DeadlineRule, RequestStatus
from slosched.metrics.columns import FloatArray, RequestColumns
from slosched.metrics.promises import token_due_s
from slosched.metrics.records import RequestRecord

_BLOCK = 1000
"""Requests that are handled at a time, since each block of them needs a dozen large arrays."""


def least_slack_s(
    records: Sequence[RequestRecord], rule: DeadlineRule, edges_s: FloatArray
) -> FloatArray:
    """Return the least slack of any request in each interval, shape (len(edges_s) - 1,).

    A request that has arrived and not ended has slack: the time until its next token is due. It
    falls until the token comes.  The slack is infinite where there is no request, or no SLO.
    """
    least = np.full(len(edges_s) - 1, math.inf)
    for i in range(0, len(records), _BLOCK):
        block = [_until_its_end(record, edges_s[-1]) for record in records[i : i + _BLOCK]]
        _lower(least, RequestColumns.of(block), rule, edges_s)
    return least


def _lower(
    least: FloatArray, columns: RequestColumns, rule: DeadlineRule, edges_s: FloatArray
) -> None:
    """Lower `least` where the slack of these requests is less."""
    due_s, until_s = token_due_s(columns, rule), columns.token_s
    since_s = np.roll(until_s, 1)
    since_s[columns.first_token[columns.has_begun]] = columns.arrival_s[columns.has_begun]
    # A wait for a token is cut at the edges; its slack is least at the right end of each piece.
    last = len(least) - 1
    first_bin = np.clip(np.searchsorted(edges_s, since_s, side="right") - 1, 0, last)
    last_bin = np.clip(np.searchsorted(edges_s, until_s, side="left") - 1, first_bin, last)
    num_bins = last_bin - first_bin + 1
    wait = np.repeat(np.arange(len(until_s)), num_bins)
    offset = np.arange(len(wait)) - np.repeat(np.cumsum(num_bins) - num_bins, num_bins)
    in_bin = first_bin[wait] + offset
    slack_s = due_s[wait] - np.minimum(until_s[wait], edges_s[in_bin + 1])
    np.minimum.at(least, in_bin, slack_s)


def _until_its_end(record: RequestRecord, end_s: float) -> RequestRecord:
    """Return the record with one more token, at its end, if the request was waiting for one."""
    if record.status is RequestStatus.FINISHED:
        return record
    cut_s = end_s if record.end_s is None else record.end_s
    times_s = [*record.token_times_s, max([cut_s, *record.token_times_s[-1:]])]
    return replace(record, token_times_s=times_s, num_output_tokens=len(times_s))
