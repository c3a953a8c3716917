"""Records as columns, so that a million tokens are scored in a few passes of numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from slosched.core import SLO, Request, RequestStatus
from slosched.metrics.records import RequestRecord

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """n requests in the order of their records, and all t tokens that they emitted."""

    arrival_s: FloatArray
    """Shape (n,), as are the other columns of requests."""
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    promised_ttft_s: FloatArray
    promised_tpot_s: FloatArray
    promised_e2e_s: FloatArray
    """Infinite where none was promised."""
    is_finished: BoolArray
    is_rejected: BoolArray
    is_relegated: BoolArray
    """Whether they were served without their SLO."""
    token_s: FloatArray
    """Times when tokens came out, of shape (t,), request by request."""
    first_token: IntArray
    """Index in `token_s` of each request's first token, of shape (n,)."""

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> RequestColumns:
        """Make the columns of these records; raise ValueError if there are none."""
        if not records:
            raise ValueError("there are no records to score: the replay offered no request")
        times_s = [np.asarray(r.token_times_s, dtype=np.float64) for r in records]
        return cls._of(records, [record.slo for record in records], np.concatenate(times_s))

    @classmethod
    def of_requests(cls, requests: Sequence[Request]) -> RequestColumns:
        """Make the columns of these requests, of which there is at least one, as they are now."""
        num_tokens = sum(request.num_output_tokens for request in requests)
        times_s = chain.from_iterable(request.token_times_s for request in requests)
        slos = [request.judged_slo for request in requests]
        return cls._of(requests, slos, np.fromiter(times_s, np.float64, num_tokens))

    @classmethod
    def _of(
        cls,
        records: Sequence[RequestRecord] | Sequence[Request],
        slos: Sequence[SLO],
        token_s: FloatArray,
    ) -> RequestColumns:
        statuses = [record.status for record in records]
        num_output_tokens = np.array([r.num_output_tokens for r in records], dtype=np.int64)
        return cls(
            arrival_s=np.array([r.arrival_s for r in records], dtype=np.float64),
            num_prompt_tokens=np.array([r.num_prompt_tokens for r in records], dtype=np.int64),
            num_output_tokens=num_output_tokens,
            promised_ttft_s=np.array([slo.ttft_s for slo in slos], dtype=np.float64),
            promised_tpot_s=np.array([slo.tpot_s for slo in slos], dtype=np.float64),
            promised_e2e_s=np.array(
                [math.inf if slo.e2e_s is None else slo.e2e_s for slo in slos], dtype=np.float64
            ),
            is_finished=np.array([s is RequestStatus.FINISHED for s in statuses]),
            is_rejected=np.array([s is RequestStatus.REJECTED for s in statuses]),
            is_relegated=np.array([record.is_relegated for record in records]),
            token_s=token_s,
            first_token=np.cumsum(num_output_tokens) - num_output_tokens,
        )

    @property
    def has_begun(self) -> BoolArray:
        """Tell which requests emitted a token, shape (n,)."""
        return self.num_output_tokens > 0

    def per_token(self, column: npt.NDArray[T]) -> npt.NDArray[T]:
        """Repeat a column of requests, shape (n,), for each of their tokens, shape (t,)."""
        return np.repeat(column, self.num_output_tokens)

    def count(self, tokens: BoolArray) -> IntArray:
        """Count each request's tokens for which `tokens`, of shape (t,), is true; shape (n,)."""
        counts = np.zeros(len(self.arrival_s), dtype=np.int64)
        if len(tokens):
            starts = self.first_token[self.has_begun]
            counts[self.has_begun] = np.add.reduceat(tokens, starts, dtype=np.int64)
        return counts

    @property
    def ttft_s(self) -> FloatArray:
        """Return the TTFT, shape (n,); NaN for requests without a token."""
        return self._first_s - self.arrival_s

    @property
    def tpot_s(self) -> FloatArray:
        """Return the TPOT, shape (n,); 0 for requests with one token, NaN without a token."""
        return (self._last_s - self._first_s) / np.maximum(self.num_output_tokens - 1, 1)

    @property
    def e2e_s(self) -> FloatArray:
        """Return the time to the last token of finished requests, shape (n,); NaN for others."""
        return np.where(self.is_finished, self._last_s - self.arrival_s, math.nan)

    @property
    def gap_s(self) -> FloatArray:
        """Return the time since the request's previous token, shape (t,); NaN for first tokens."""
        gaps = np.diff(self.token_s, prepend=math.nan)
        gaps[self.first_token[self.has_begun]] = math.nan
        return gaps

    @property
    def _first_s(self) -> FloatArray:
        return self._token_s_at(self.first_token)

    @property
    def _last_s(self) -> FloatArray:
        return self._token_s_at(self.first_token + self.num_output_tokens - 1)

    def _token_s_at(self, index: IntArray) -> FloatArray:
        times = np.full(len(self.arrival_s), math.nan)
        times[self.has_begun] = self.token_s[index[self.has_begun]]
        return times
