"""The outcome of each request of a replay, and which requests count."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from slosched.core import DeadlineRule, Request, RequestStatus
from slosched.metrics import RequestColumns, RequestRecord, good_requests, records_of

OUTCOME = np.dtype(
    [
        ("arrival_s", "<f8"),
        ("ended_after_s", "<f4"),
        ("ttft_s", "<f4"),
        ("tpot_s", "<f4"),
        ("output_tokens", "<i4"),
        ("finished", "?"),
        ("good", "?"),
    ]
)
"""The outcome of one request.  NaN stands for times of tokens that never came out, and for the
end of a request that never ended."""

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

WARM_UP_E2E = 2.0
"""The length of the warm-up, as a multiple of the P99 of the end-to-end time."""
MAX_WARM_UP_SHARE = 0.5
"""The greatest share of the requests that the warm-up may take; an overloaded replay would else
never end it."""
_NUM_QUEUE_WINDOWS = 10


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The requests of one replay in the order of its trace, as a record array of `OUTCOME`.

    In a closed loop they arrive in another order, which differs from policy to policy.
    """

    requests: npt.NDArray[np.void]

    @classmethod
    def of(cls, requests: Sequence[Request], rule: DeadlineRule) -> Outcomes:
        """Take the outcomes from requests in the order of their trace."""
        return cls.of_records(records_of(requests, rule), rule)

    @classmethod
    def of_records(cls, records: Sequence[RequestRecord], rule: DeadlineRule) -> Outcomes:
        """Take the outcomes from records in the order of their trace, as of a live replay."""
        good = good_requests(RequestColumns.of(records), rule)
        rows = [_outcome(record, is_good) for record, is_good in zip(records, good, strict=True)]
        return cls(np.array(rows, dtype=OUTCOME))

    @classmethod
    def unpack(cls, blob: bytes) -> Outcomes:
        return cls(np.frombuffer(zlib.decompress(blob), dtype=OUTCOME))

    def among(self, chosen: BoolArray) -> Outcomes:
        """Return the outcomes of these requests alone."""
        return Outcomes(self.requests[chosen])

    def pack(self) -> bytes:
        return zlib.compress(self.requests.tobytes())

    @property
    def digest(self) -> str:
        """Return a digest of the bits of all outcomes, before any compression."""
        return hashlib.sha256(self.requests.tobytes()).hexdigest()

    @property
    def good(self) -> BoolArray:
        return self.requests["good"]

    @cached_property
    def warm_up_s(self) -> float:
        """Return the warm-up that the rule asks for, even if the replay was too short for it."""
        ended = self.requests["ended_after_s"][self.requests["finished"]]
        return WARM_UP_E2E * float(np.percentile(ended, 99)) if len(ended) else 0.0

    @property
    def is_short(self) -> bool:
        """Tell whether the replay was too short to warm up; then its second half counts."""
        return self._num_warm_up() > MAX_WARM_UP_SHARE * len(self.requests)

    @cached_property
    def counted(self) -> BoolArray:
        """Mark the requests that arrived after the warm-up, shape (n,)."""
        first = min(self._num_warm_up(), int(MAX_WARM_UP_SHARE * len(self.requests)))
        counted = np.zeros(len(self.requests), dtype=np.bool_)
        counted[self._by_arrival[first:]] = True
        return counted

    @cached_property
    def attainment(self) -> float:
        """Return the share of good requests among those offered after the warm-up."""
        return float(self.good[self.counted].mean())

    def queue_means(self) -> FloatArray:
        """Return the mean queue that arrivals found, for ten equal parts of the counted requests.

        The queue consists of the requests without a first token.
        """
        requests = self.requests[self._by_arrival]
        arrivals = requests["arrival_s"]
        ttft_s = requests["ttft_s"]
        waited_s = np.where(np.isnan(ttft_s), requests["ended_after_s"], ttft_s)
        left = np.sort(arrivals + np.nan_to_num(waited_s, nan=np.inf))
        waiting = np.arange(len(arrivals)) - np.searchsorted(left, arrivals, side="right")
        parts = np.array_split(waiting[self.counted[self._by_arrival]], _NUM_QUEUE_WINDOWS)
        return np.array([part.mean() for part in parts if len(part)], dtype=np.float64)

    @cached_property
    def _by_arrival(self) -> npt.NDArray[np.intp]:
        """Return the places of the requests in order of arrival."""
        return np.argsort(self.requests["arrival_s"], kind="stable")

    def _num_warm_up(self) -> int:
        arrivals = self.requests["arrival_s"]
        return int((arrivals < arrivals.min() + self.warm_up_s).sum())


def _outcome(record: RequestRecord, is_good: bool) -> tuple[object, ...]:
    ended_after_s = np.nan if record.end_s is None else record.end_s - record.arrival_s
    return (
        record.arrival_s,
        ended_after_s,
        np.nan if record.ttft_s is None else record.ttft_s,
        np.nan if record.tpot_s is None else record.tpot_s,
        record.num_output_tokens,
        record.status is RequestStatus.FINISHED,
        is_good,
    )
