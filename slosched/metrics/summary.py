"""The summary of one replay, in one row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from slosched.core import DeadlineRule, EndReason, RequestStatus
from slosched.metrics.columns import FloatArray, RequestColumns
from slosched.metrics.fairness import deciles, jain_index
from slosched.metrics.fluidity import FLUID_INDEX, fluidity_indices
from slosched.metrics.programs import num_programs_on_time
from slosched.metrics.promises import (
    good_requests,
    late_gaps,
    tokens_kept,
    tokens_on_time,
    ttft_kept,
)
from slosched.metrics.records import RequestRecord

PERCENTILES = (50, 90, 99)


def offered_window_s(records: Sequence[RequestRecord]) -> float:
    """Return the seconds in which the load was offered: n times the mean gap between arrivals.

    That is (last - first arrival) * n / (n - 1).  The last request counts a gap, too. So n divided
    by this is `Trace.rate`, and a policy that serves everything well has exactly the offered rate
    as its good requests/s.  0 for a single request, or if all arrive at the same time.
    """
    if len(records) < 2:
        return 0.0
    arrivals_s = [record.arrival_s for record in records]
    return (max(arrivals_s) - min(arrivals_s)) * len(records) / (len(records) - 1)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """p50, p90 and p99 with linear interpolation; NaN if there was nothing to rank."""

    p50: float
    p90: float
    p99: float


def percentiles(values: Sequence[float] | FloatArray) -> Percentiles:
    """Return the percentiles of values in any order; NaN counts as missing."""
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        return Percentiles(math.nan, math.nan, math.nan)
    return Percentiles(*np.percentile(known, PERCENTILES, overwrite_input=True).tolist())


@dataclass(frozen=True, slots=True)
class Summary:
    """The metrics of one replay.  Rates are NaN if all requests arrived at the same time."""

    deadline_rule: DeadlineRule
    num_offered: int
    num_finished: int
    num_rejected: int
    num_aborted: int
    num_unfinished: int
    num_good: int
    attainment: float
    """Good / offered."""
    attainment_admitted: float
    """Good / (offered - rejected); NaN if all were rejected."""
    ttft_attainment: float
    """Share of the offered requests whose first token was on time, whatever came after."""
    token_attainment: float
    """Share of the offered requests that finished and kept their TPOT, as the rule reads it."""
    on_time_tokens: dict[DeadlineRule, float]
    """Share of the tokens that came out by their deadline, under each of the three rules."""
    late_gap_share: float
    """Share of all gaps between tokens that are longer than the promised TPOT."""
    mean_fluidity: float
    """Mean fluidity index of the requests that emitted a token."""
    fluid_attainment: float
    """Share of the offered requests with a fluidity index of at least `FLUID_INDEX`."""
    offered_requests_per_s: float
    good_requests_per_s: float
    good_tokens_per_s: float
    """Output tokens of good requests, per second of the offered load."""
    on_time_tokens_per_s: float
    """Tokens of all requests that came out by their deadline under `deadline_rule`."""
    output_tokens_per_s: float
    """The throughput: all output tokens, over the time from first arrival to last token."""
    ttft_s: Percentiles
    """Over requests that emitted a token, as is `tpot_s`."""
    tpot_s: Percentiles
    itl_s: Percentiles
    """Over all gaps of all requests."""
    e2e_s: Percentiles
    """Over finished requests."""
    rejected_by_reason: dict[EndReason, int]
    worst_decile_attainment: float
    """The lowest attainment of any tenth of the requests by prompt length."""
    jain_index: float
    """Jain's index over the attainments of the tenths; NaN if no request was good."""
    num_preemptions: int
    num_swaps: int
    prefix_hit_rate: float
    """Share of prompt tokens found in the prefix cache, over requests that emitted a token."""
    num_programs: int
    """Sessions that were promised a time as a whole."""
    program_attainment: float
    """Share of them that finished within it; NaN if there are none."""

    def as_row(self) -> dict[str, str | float]:
        """Return a flat row for a DataFrame, NaN where unknown.

        Its names are `ttft_p90_s`, `rejected_expired` and so on.
        """
        row: dict[str, str | float] = {}
        for name, value in asdict(self).items():
            if name == "rejected_by_reason":
                row |= {f"rejected_{reason}": count for reason, count in value.items()}
            elif name == "on_time_tokens":
                row |= {f"{name}_{rule}": share for rule, share in value.items()}
            elif isinstance(value, dict):
                stem = name.removesuffix("_s")
                row |= {f"{stem}_{percent}_s": seconds for percent, seconds in value.items()}
            else:
                row[name] = str(value) if isinstance(value, DeadlineRule) else value
        return row


def summarize(records: Sequence[RequestRecord], rule: DeadlineRule) -> Summary:
    """Score the records of one replay, which must contain every offered request."""
    if not records:
        raise ValueError("there are no records to summarize: the replay offered no request")
    columns = RequestColumns.of(records)
    good, begun = good_requests(columns, rule), columns.has_begun
    num_good, num_offered = int(good.sum()), len(records)
    window_s, busy_s = offered_window_s(records), _busy_s(columns)
    num_tokens, num_gaps = len(columns.token_s), len(columns.token_s) - int(begun.sum())
    num_on_time = {r: int(tokens_on_time(columns, r).sum()) for r in DeadlineRule}
    fluidity = fluidity_indices(columns)
    num_on_time_programs, num_programs = num_programs_on_time(records)
    statuses = Counter(record.status for record in records)
    num_rejected = statuses[RequestStatus.REJECTED]
    shares = [row.attainment for row in deciles(columns, good)]
    return Summary(
        deadline_rule=rule,
        num_offered=num_offered,
        num_finished=statuses[RequestStatus.FINISHED],
        num_rejected=num_rejected,
        num_aborted=statuses[RequestStatus.ABORTED],
        num_unfinished=sum(n for status, n in statuses.items() if not status.is_ended),
        num_good=num_good,
        attainment=num_good / num_offered,
        attainment_admitted=_ratio(num_good, num_offered - num_rejected),
        ttft_attainment=float(ttft_kept(columns).mean()),
        token_attainment=float((columns.is_finished & tokens_kept(columns, rule)).mean()),
        on_time_tokens={r: _ratio(n, num_tokens) for r, n in num_on_time.items()},
        late_gap_share=_ratio(int(late_gaps(columns).sum()), num_gaps),
        mean_fluidity=_mean(fluidity[begun]),
        fluid_attainment=float((fluidity >= FLUID_INDEX).mean()),
        offered_requests_per_s=_ratio(num_offered, window_s),
        good_requests_per_s=_ratio(num_good, window_s),
        good_tokens_per_s=_ratio(int(columns.num_output_tokens[good].sum()), window_s),
        on_time_tokens_per_s=_ratio(num_on_time[rule], window_s),
        output_tokens_per_s=_ratio(num_tokens, busy_s),
        ttft_s=percentiles(columns.ttft_s),
        tpot_s=percentiles(columns.tpot_s),
        itl_s=percentiles(columns.gap_s),
        e2e_s=percentiles(columns.e2e_s),
        rejected_by_reason=_rejected_by_reason(records),
        worst_decile_attainment=min(shares),
        jain_index=jain_index(shares),
        num_preemptions=sum(record.num_preemptions for record in records),
        num_swaps=sum(record.num_swaps for record in records),
        prefix_hit_rate=_prefix_hit_rate(records),
        num_programs=num_programs,
        program_attainment=_ratio(num_on_time_programs, num_programs),
    )


def _rejected_by_reason(records: Sequence[RequestRecord]) -> dict[EndReason, int]:
    rejected = (r.end_reason for r in records if r.status is RequestStatus.REJECTED)
    return dict(Counter(reason for reason in rejected if reason is not None))


def _prefix_hit_rate(records: Sequence[RequestRecord]) -> float:
    begun = [record for record in records if record.num_output_tokens]
    num_cached = sum(record.num_cached_tokens for record in begun)
    return _ratio(num_cached, sum(record.num_prompt_tokens for record in begun))


def _busy_s(columns: RequestColumns) -> float:
    """Return the seconds from the first arrival to the last token."""
    last_s = float(columns.token_s.max()) if len(columns.token_s) else -math.inf
    return last_s - float(columns.arrival_s.min())


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan
