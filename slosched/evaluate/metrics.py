"""What a replay was worth: pure functions over the records of its requests.

The same functions score the simulator, our server and any other: they see records, not engines.

Definitions.  Token times t_0 < t_1 < ... of a request that arrived at a:

* TTFT = t_0 - a, queueing included.  E2E = t_(n-1) - a of a finished request.
* TPOT = (t_(n-1) - t_0) / (n - 1), one number a request; 0 for a single token.
* ITL (also TBT) = every gap t_j - t_(j-1), many numbers a request.
* A request is good if it FINISHED and kept TTFT, tokens (by the `DeadlineRule`) and, if that was
  promised, E2E.  Rejected, aborted and unfinished requests are misses.
* Attainment = good / offered requests.  On admitted requests it is a secondary figure: a policy
  can raise it by rejecting more.
* Good requests/s and good tokens/s divide by the time in which the load was offered, see
  `offered_window_s`: it is the same for every policy, and a policy that drains its queue for an
  hour gains nothing.  ("Goodput" alone, the highest rate at which attainment holds, takes a sweep.)

Comparisons with a promise allow `TOLERANCE_S`, so that a token due at 0.1 + 0.2 and out at 0.3 is
on time; it is far below anything that a clock or a user can tell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from slosched.core import SLO, DeadlineRule, EndReason, Request, RequestStatus

TOLERANCE_S = 1e-9
MAX_LATE_GAP_SHARE = 0.01
"""Under the rule `tbt` a request keeps its tokens if at most this share of its gaps is late."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What became of one request.  It may not have ended, where a replay was cut off."""

    request_id: str
    arrival_s: float
    """When it was scheduled to arrive, not when a late client sent it."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Tokens that came out, one of `token_times_s` each."""
    slo: SLO
    status: RequestStatus
    end_reason: EndReason | None = None
    token_times_s: tuple[float, ...] = ()
    end_s: float | None = None
    num_preemptions: int = 0
    num_swaps: int = 0

    def __post_init__(self) -> None:
        if len(self.token_times_s) != self.num_output_tokens:
            raise ValueError(
                f"request {self.request_id!r} has {self.num_output_tokens} output tokens "
                f"but {len(self.token_times_s)} token times"
            )

    @classmethod
    def from_request(cls, request: Request) -> RequestRecord:
        """A record of the request as it is now; later progress does not change it."""
        return cls(
            request_id=request.request_id,
            arrival_s=request.arrival_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            slo=request.slo,
            status=request.status,
            end_reason=request.end_reason,
            token_times_s=tuple(request.token_times_s),
            end_s=request.end_s,
            num_preemptions=request.num_preemptions,
            num_swaps=request.num_swaps,
        )

    @property
    def ttft_s(self) -> float | None:
        """None if no token came out."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """None if no token came out, 0 if only one did."""
        if not self.token_times_s:
            return None
        num_gaps = len(self.token_times_s) - 1
        return (self.token_times_s[-1] - self.token_times_s[0]) / num_gaps if num_gaps else 0.0

    @property
    def itl_s(self) -> tuple[float, ...]:
        """The gaps between tokens, one fewer than tokens."""
        return tuple(b - a for a, b in pairwise(self.token_times_s))

    @property
    def e2e_s(self) -> float | None:
        """From arrival to the last token of a finished request; None for any other."""
        if self.status is not RequestStatus.FINISHED or not self.token_times_s:
            return None
        return self.token_times_s[-1] - self.arrival_s


@dataclass(frozen=True, slots=True)
class StepRow:
    """One executed step, for timelines and for checking the latency model."""

    start_s: float
    duration_s: float
    predicted_s: float | None
    num_prefill_tokens: int
    num_decodes: int
    num_waiting: int
    num_running: int
    num_swapped: int
    kv_used_fraction: float
    num_rejected: int
    """Rejected in this step, not so far."""


def met_ttft(record: RequestRecord) -> bool:
    """True if the first token came out in time."""
    ttft_s = record.ttft_s
    return ttft_s is not None and ttft_s <= record.slo.ttft_s + TOLERANCE_S


def met_tokens(record: RequestRecord, rule: DeadlineRule) -> bool:
    """True if the tokens that came out kept the promise, as `rule` reads it.

    `mean_tpot`: TPOT <= tpot.  `envelope`: every t_j <= a + ttft + j * tpot.  `tbt`: at most
    `MAX_LATE_GAP_SHARE` of the gaps exceed tpot.  False if no token came out.
    """
    times, slo = record.token_times_s, record.slo
    if record.tpot_s is None:
        return False
    if rule is DeadlineRule.MEAN_TPOT:
        return record.tpot_s <= slo.tpot_s + TOLERANCE_S
    if rule is DeadlineRule.ENVELOPE:
        first_due_s = record.arrival_s + slo.ttft_s + TOLERANCE_S
        later = enumerate(times[1:], start=1)  # apart from the first, as 0 * inf is not 0
        return times[0] <= first_due_s and all(t <= first_due_s + j * slo.tpot_s for j, t in later)
    num_late = sum(gap > slo.tpot_s + TOLERANCE_S for gap in record.itl_s)
    return num_late <= MAX_LATE_GAP_SHARE * (len(times) - 1)


def met_e2e(record: RequestRecord) -> bool:
    """True if no end-to-end time was promised or the last token came out within it."""
    if record.slo.e2e_s is None:
        return True
    e2e_s = record.e2e_s
    return e2e_s is not None and e2e_s <= record.slo.e2e_s + TOLERANCE_S


def is_good(record: RequestRecord, rule: DeadlineRule) -> bool:
    """True if the request finished and every promise made to it was kept."""
    return (
        record.status is RequestStatus.FINISHED
        and met_ttft(record)
        and met_e2e(record)
        and met_tokens(record, rule)
    )


def offered_window_s(records: Sequence[RequestRecord]) -> float:
    """Seconds in which the load was offered: n mean gaps, (last - first arrival) * n / (n - 1).

    The last request gets its gap too, so that n divided by this is `Trace.rate`, and a policy
    that serves everything well has exactly the offered rate as its good requests/s.  0 for one
    request or one instant.
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


def percentiles(values: Sequence[float]) -> Percentiles:
    """Of any number of values, in any order."""
    if not len(values):
        return Percentiles(math.nan, math.nan, math.nan)
    return Percentiles(*(float(p) for p in np.percentile(values, PERCENTILES)))


@dataclass(frozen=True, slots=True)
class Summary:
    """One replay in one row.  Rates are NaN where the load was offered in no time at all."""

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
    """Offered requests whose first token was on time, whatever came after."""
    token_attainment: float
    """Offered requests that finished and kept the token rule, whenever they began."""
    offered_requests_per_s: float
    good_requests_per_s: float
    good_tokens_per_s: float
    """Output tokens of good requests."""
    output_tokens_per_s: float
    """All output tokens, from the first arrival to the last token: the throughput."""
    ttft_s: Percentiles
    """Over requests that emitted a token, as is `tpot_s`."""
    tpot_s: Percentiles
    itl_s: Percentiles
    """Over all gaps of all requests."""
    e2e_s: Percentiles
    """Over finished requests."""
    rejected_by_reason: dict[EndReason, int]
    num_preemptions: int
    num_swaps: int

    def as_row(self) -> dict[str, str | float]:
        """Flat, for a DataFrame: `ttft_p90_s`, `rejected_expired` and so on, NaN where unknown."""
        row: dict[str, str | float] = {}
        for name, value in asdict(self).items():
            if name == "rejected_by_reason":
                row |= {f"rejected_{reason}": count for reason, count in value.items()}
            elif isinstance(value, dict):
                stem = name.removesuffix("_s")
                row |= {f"{stem}_{percent}_s": seconds for percent, seconds in value.items()}
            else:
                row[name] = str(value) if isinstance(value, DeadlineRule) else value
        return row


def summarize(records: Sequence[RequestRecord], rule: DeadlineRule) -> Summary:
    """Score the records of one replay, every offered request among them."""
    if not records:
        raise ValueError("there are no records to summarize: the replay offered no request")
    statuses = Counter(record.status for record in records)
    reasons = Counter(r.end_reason for r in records if r.status is RequestStatus.REJECTED)
    good = [record for record in records if is_good(record, rule)]
    begun = [record for record in records if record.token_times_s]
    finished = [record for record in records if record.status is RequestStatus.FINISHED]
    num_admitted = len(records) - statuses[RequestStatus.REJECTED]
    start_s = min(record.arrival_s for record in records)
    busy_s = max((record.token_times_s[-1] for record in begun), default=start_s) - start_s
    window_s = offered_window_s(records)
    return Summary(
        deadline_rule=rule,
        num_offered=len(records),
        num_finished=len(finished),
        num_rejected=statuses[RequestStatus.REJECTED],
        num_aborted=statuses[RequestStatus.ABORTED],
        num_unfinished=sum(not record.status.is_ended for record in records),
        num_good=len(good),
        attainment=len(good) / len(records),
        attainment_admitted=_ratio(len(good), num_admitted),
        ttft_attainment=sum(map(met_ttft, begun)) / len(records),
        token_attainment=sum(met_tokens(r, rule) for r in finished) / len(records),
        offered_requests_per_s=_ratio(len(records), window_s),
        good_requests_per_s=_ratio(len(good), window_s),
        good_tokens_per_s=_ratio(sum(r.num_output_tokens for r in good), window_s),
        output_tokens_per_s=_ratio(sum(r.num_output_tokens for r in records), busy_s),
        ttft_s=percentiles([record.token_times_s[0] - record.arrival_s for record in begun]),
        tpot_s=percentiles([record.tpot_s for record in begun if record.tpot_s is not None]),
        itl_s=percentiles([gap for record in begun for gap in record.itl_s]),
        e2e_s=percentiles([record.e2e_s for record in finished if record.e2e_s is not None]),
        rejected_by_reason={reason: n for reason, n in reasons.items() if reason is not None},
        num_preemptions=sum(record.num_preemptions for record in records),
        num_swaps=sum(record.num_swaps for record in records),
    )


@dataclass(frozen=True, slots=True)
class DecileRow:
    """The requests of one range of prompt lengths, both ends included."""

    min_prompt_tokens: int
    max_prompt_tokens: int
    num_offered: int
    num_good: int
    num_rejected: int

    @property
    def attainment(self) -> float:
        return self.num_good / self.num_offered


def attainment_by_decile(records: Sequence[RequestRecord], rule: DeadlineRule) -> list[DecileRow]:
    """Attainment by prompt length, shortest first: who pays for the total.

    Ten ranges that hold equal numbers of requests, as far as equal prompts can stay together;
    fewer where there are not ten different lengths.
    """
    if not records:
        return []
    lengths = np.array([record.num_prompt_tokens for record in records])
    edges = np.unique(np.quantile(lengths, np.arange(1, 10) / 10))
    ranges = np.searchsorted(edges, lengths, side="left")
    rows = []
    for i in np.unique(ranges):
        inside = [record for record, j in zip(records, ranges, strict=True) if j == i]
        prompts = [record.num_prompt_tokens for record in inside]
        rows.append(
            DecileRow(
                min_prompt_tokens=min(prompts),
                max_prompt_tokens=max(prompts),
                num_offered=len(inside),
                num_good=sum(is_good(record, rule) for record in inside),
                num_rejected=sum(r.status is RequestStatus.REJECTED for r in inside),
            )
        )
    return rows


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan
