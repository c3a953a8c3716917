"""Who pays for a policy's total: attainment by prompt length and by promise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slosched.core import SLO, DeadlineRule
from slosched.metrics.columns import BoolArray, IntArray, RequestColumns
from slosched.metrics.promises import good_requests
from slosched.metrics.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Share:
    """What became of a part of the offered requests."""

    num_offered: int
    num_good: int
    num_rejected: int

    @property
    def attainment(self) -> float:
        return self.num_good / self.num_offered


@dataclass(frozen=True, slots=True)
class DecileRow(Share):
    """The requests of one range of prompt lengths, both ends included."""

    min_prompt_tokens: int
    max_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TierRow(Share):
    """The requests that were promised the same."""

    slo: SLO


def attainment_by_decile(records: Sequence[RequestRecord], rule: DeadlineRule) -> list[DecileRow]:
    """Attainment by prompt length, shortest first.

    Ten ranges that hold equal numbers of requests, as far as equal prompts can stay together;
    fewer where there are not ten different lengths.
    """
    if not records:
        return []
    columns = RequestColumns.of(records)
    return deciles(columns, good_requests(columns, rule))


def attainment_by_tier(records: Sequence[RequestRecord], rule: DeadlineRule) -> list[TierRow]:
    """Attainment of each different promise, the tightest TTFT first, then the tightest TPOT."""
    if not records:
        return []
    columns = RequestColumns.of(records)
    good = good_requests(columns, rule)
    tiers = sorted({record.slo for record in records}, key=_tightness)
    number = {slo: i for i, slo in enumerate(tiers)}
    of_request = np.array([number[record.slo] for record in records])
    counts = _counts(columns, good, of_request, len(tiers))
    return [TierRow(*count, slo=slo) for slo, count in zip(tiers, counts, strict=True)]


def deciles(columns: RequestColumns, good: BoolArray) -> list[DecileRow]:
    """`attainment_by_decile` of requests that are judged already."""
    lengths = columns.num_prompt_tokens
    of_request = decile_of(lengths)
    rows = []
    for i, count in enumerate(_counts(columns, good, of_request, int(of_request.max()) + 1)):
        inside = lengths[of_request == i]
        ends = int(inside.min()), int(inside.max())
        rows.append(DecileRow(*count, min_prompt_tokens=ends[0], max_prompt_tokens=ends[1]))
    return rows


def decile_of(lengths: IntArray) -> IntArray:
    """The range of prompt lengths that each request is in, shape (n,), counted from 0."""
    edges = np.unique(np.quantile(lengths, np.arange(1, 10) / 10))
    found = np.searchsorted(edges, lengths, side="left")
    return np.unique(found, return_inverse=True)[1].astype(np.int64)


def jain_index(shares: Sequence[float]) -> float:
    """Jain's index (sum x)^2 / (n sum x^2): 1 if all are equal, 1/n if one has all; NaN of zeros.

    Of the attainments by decile: how evenly a policy serves short and long prompts.
    """
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else math.nan


def _counts(
    columns: RequestColumns, good: BoolArray, part: IntArray, num_parts: int
) -> list[tuple[int, int, int]]:
    """Offered, good and rejected requests of each part."""
    columns_of_counts = [
        np.bincount(part[mask], minlength=num_parts).tolist()
        for mask in (np.ones_like(good), good, columns.is_rejected)
    ]
    return list(zip(*columns_of_counts, strict=True))


def _tightness(slo: SLO) -> tuple[float, float, float]:
    return slo.ttft_s, slo.tpot_s, math.inf if slo.e2e_s is None else slo.e2e_s
