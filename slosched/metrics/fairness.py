"""Fairness: which requests pay for a policy's total, by prompt length and by SLO."""

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
    """Numbers of offered, good and rejected requests in a part of all requests."""

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
    """The requests that have the same SLO."""

    slo: SLO


def attainment_by_decile(records: Sequence[RequestRecord], rule: DeadlineRule) -> list[DecileRow]:
    """Return the attainment by prompt length, shortest first.

    The ten ranges hold equal numbers of requests, as far as requests of equal length can stay
    together. There are fewer ranges if there are fewer than ten different lengths.
    """
    if not records:
        return []
    columns = RequestColumns.of(records)
    return deciles(columns, good_requests(columns, rule))


def attainment_by_tier(records: Sequence[RequestRecord], rule: DeadlineRule) -> list[TierRow]:
    """Return the attainment of each different SLO, by tightest TTFT, then by tightest TPOT."""
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
    """Return `attainment_by_decile` of requests that have been judged."""
    lengths = columns.num_prompt_tokens
    of_request = decile_of(lengths)
    rows = []
    for i, count in enumerate(_counts(columns, good, of_request, int(of_request.max()) + 1)):
        inside = lengths[of_request == i]
        ends = int(inside.min()), int(inside.max())
        rows.append(DecileRow(*count, min_prompt_tokens=ends[0], max_prompt_tokens=ends[1]))
    return rows


def decile_of(lengths: IntArray) -> IntArray:
    """Return the index, from 0, of each request's range of prompt lengths, shape (n,)."""
    edges = np.unique(np.quantile(lengths, np.arange(1, 10) / 10))
    found = np.searchsorted(edges, lengths, side="left")
    return np.unique(found, return_inverse=True)[1].astype(np.int64)


def jain_index(shares: Sequence[float]) -> float:
    """Return Jain's index (sum x)^2 / (n sum x^2).

    It is 1 if all shares are equal, 1/n if only one is not zero, and NaN if all are zero. Over the
    attainments by decile it tells how evenly a policy serves short and long prompts.
    """
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else math.nan


def _counts(
    columns: RequestColumns, good: BoolArray, part: IntArray, num_parts: int
) -> list[tuple[int, int, int]]:
    """Count the offered, good and rejected requests of each part."""
    columns_of_counts = [
        np.bincount(part[mask], minlength=num_parts).tolist()
        for mask in (np.ones_like(good), good, columns.is_rejected)
    ]
    return list(zip(*columns_of_counts, strict=True))


def _tightness(slo: SLO) -> tuple[float, float, float]:
    return slo.ttft_s, slo.tpot_s, math.inf if slo.e2e_s is None else slo.e2e_s
