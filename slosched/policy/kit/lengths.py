"""Output lengths of finished requests: all that a policy may know about lengths to come."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from slosched.core import Request, RequestStatus

Floats = npt.NDArray[np.float64]

_WINDOW = 1000
"""Number of finished requests that are remembered, as in Past-Future (ASPLOS '25, LightLLM)."""


class OutputLengths:
    """Output tokens that requests are expected to emit, learnt from longer finished requests.

    Before any request has finished there is one sample, the prior.  Call `watch` whenever a prompt
    runs, which every request's prompt does, and `update` before asking.
    """

    def __init__(self, prior_tokens: int) -> None:
        if prior_tokens < 1:
            raise ValueError(f"expected output tokens must be at least 1, not {prior_tokens}")
        self._lengths: deque[int] = deque([prior_tokens], maxlen=_WINDOW)
        self._watched: dict[str, Request] = {}
        self._sort()

    def watch(self, request: Request) -> None:
        """Remember a request until it ends."""
        self._watched[request.request_id] = request

    def update(self) -> None:
        """Learn from the watched requests that have ended since the last call."""
        ended = [r for r in self._watched.values() if r.end_reason is not None]
        if not ended:
            return
        for request in ended:
            del self._watched[request.request_id]
            if request.status is RequestStatus.FINISHED:
                self._lengths.append(request.num_output_tokens)
        self._sort()

    def expected_left(self, num_output_tokens: npt.ArrayLike) -> Floats:
        """Return the mean of tokens still to come for requests that have emitted so many.

        It is the mean over the finished requests that were longer, and at least 1.
        """
        so_far = np.asarray(num_output_tokens, dtype=np.float64)
        mean_of_longer = self._mean_from[np.searchsorted(self._sorted, so_far, side="right")]
        left: Floats = np.maximum(mean_of_longer - so_far, 1.0)
        return left

    @property
    def longest(self) -> float:
        """Return the longest remembered output, in tokens."""
        return float(self._sorted[-1])

    def upper_left(self, num_output_tokens: npt.ArrayLike, quantile: npt.ArrayLike) -> Floats:
        """Return the tokens to come that a share `quantile` of the longer requests did not exceed.

        The result is at least 1.
        """
        so_far = np.asarray(num_output_tokens, dtype=np.float64)
        first = np.searchsorted(self._sorted, so_far, side="right")
        num_longer = len(self._sorted) - first
        place = (
            first + np.maximum(np.ceil(np.asarray(quantile) * num_longer).astype(np.int64), 1) - 1
        )
        upper = self._sorted[np.minimum(place, len(self._sorted) - 1)]
        left: Floats = np.maximum(upper - so_far, 1.0)
        return left

    def _sort(self) -> None:
        self._sorted = np.sort(np.array(self._lengths, dtype=np.float64))
        count = np.arange(len(self._sorted), 0, -1)
        mean_from = np.cumsum(self._sorted[::-1])[::-1] / count
        self._mean_from = np.append(mean_from, 0.0)
        """Mean of the sorted lengths from each place on; 0 after the last."""
