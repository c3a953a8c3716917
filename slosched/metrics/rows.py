"""What remains of requests where the times of all their tokens are too many to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from slosched.core import DeadlineRule, Request
from slosched.metrics.columns import BoolArray, FloatArray, IntArray, RequestColumns
from slosched.metrics.promises import good_requests


@dataclass(frozen=True, slots=True)
class RequestRows:
    """A row for each of n requests, as columns of shape (n,); 43 bytes each."""

    arrival_s: FloatArray
    ttft_s: FloatArray
    """NaN for a request without a token, as are the other times."""
    tpot_s: FloatArray
    largest_gap_s: FloatArray
    """The longest time between two tokens; 0 for one token."""
    num_output_tokens: IntArray
    is_finished: BoolArray
    is_rejected: BoolArray
    is_good: BoolArray
    """Whether it finished and kept its whole SLO."""

    @classmethod
    def of(cls, requests: Sequence[Request], rule: DeadlineRule) -> RequestRows:
        """Return the rows of requests that have ended, of which there is at least one."""
        columns = RequestColumns.of_requests(requests)
        gaps_s = np.nan_to_num(columns.gap_s, copy=False)
        largest_s = np.full(len(requests), np.nan)
        begun = columns.has_begun
        if begun.any():
            largest_s[begun] = np.maximum.reduceat(gaps_s, columns.first_token[begun])
        return cls(
            arrival_s=columns.arrival_s,
            ttft_s=columns.ttft_s,
            tpot_s=columns.tpot_s,
            largest_gap_s=largest_s,
            num_output_tokens=columns.num_output_tokens,
            is_finished=columns.is_finished,
            is_rejected=columns.is_rejected,
            is_good=good_requests(columns, rule),
        )

    @classmethod
    def empty(cls, num_requests: int) -> RequestRows:
        """Return rows to be filled by `put`."""
        return cls(
            arrival_s=np.full(num_requests, np.nan),
            ttft_s=np.full(num_requests, np.nan),
            tpot_s=np.full(num_requests, np.nan),
            largest_gap_s=np.full(num_requests, np.nan),
            num_output_tokens=np.zeros(num_requests, dtype=np.int64),
            is_finished=np.zeros(num_requests, dtype=np.bool_),
            is_rejected=np.zeros(num_requests, dtype=np.bool_),
            is_good=np.zeros(num_requests, dtype=np.bool_),
        )

    def put(self, places: npt.NDArray[np.int64], rows: RequestRows) -> None:
        """Write `rows` to these places."""
        for each in fields(self):
            getattr(self, each.name)[places] = getattr(rows, each.name)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def attainment(self) -> float:
        """Return the share of the requests that are good."""
        return float(self.is_good.mean())
