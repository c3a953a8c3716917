"""Predicted: as many replicas as the latency model says the coming traffic needs."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean

from slosched.core import Request, RequestStatus
from slosched.fleet.scaler import FleetState, Scaler
from slosched.fleet.steady import MeanRequest, sustained_rate
from slosched.policy.kit.checks import check_positive, check_positive_share

_NUM_ENDED = 1000
"""The number of latest answers whose mean length stands for those that are to come."""


@dataclass
class Predicted(Scaler):
    """Compares the rate that is to be expected with the one that a replica sustains.

    - The rate is that of the latest half of the last `window_s`, or, if it rises, the line through
      its two halves at the time when a replica that is started now takes requests.
    - A replica sustains what `sustained_rate` says for the mean lengths and the mean TPOT of the
      same requests; answers that have not ended have the mean length of the last ones that have.
    - The fleet has so many replicas that each is loaded to the share `load` of that.

    Until an answer has ended it wants what there is, and no replica where nothing has arrived for
    `window_s`, so that the fleet shrinks.  Source: ours.
    """

    window_s: float = 120.0
    load: float = 0.75

    def __post_init__(self) -> None:
        check_positive_share(load=self.load)
        check_positive(window_s=self.window_s)
        super().__post_init__()

    def reset(self) -> None:
        self._arrived: deque[Request] = deque()
        """The requests of the window, in order of arrival."""
        self._open: list[Request] = []
        """Requests that had not ended at the last decision."""
        self._outputs: deque[int] = deque(maxlen=_NUM_ENDED)

    def note_arrival(self, request: Request) -> None:
        self._arrived.append(request)
        self._open.append(request)

    def num_wanted(self, state: FleetState) -> int:
        self._look(state)
        if not self._outputs:
            return state.num_replicas
        if not self._arrived:
            return 0
        promised = [r.slo.tpot_s for r in self._arrived if r.slo.tpot_s < math.inf]
        mean = MeanRequest(
            fmean(r.num_prompt_tokens for r in self._arrived),
            max(1.0, fmean(self._outputs)),
            fmean(promised) if promised else math.inf,
        )
        rate = self._expected_rate(state.now_s, state.startup_s)
        return math.ceil(rate / (self.load * sustained_rate(state.kind, mean)))

    def _look(self, state: FleetState) -> None:
        """Forget what arrived before the window, and note how long the answers became."""
        for replica in state.replicas:
            _ = replica.num_requests  # simulates it up to now
        while self._arrived and self._arrived[0].arrival_s <= state.now_s - self.window_s:
            self._arrived.popleft()
        still_open = []
        for request in self._open:
            if request.end_s is None or request.end_s > state.now_s:
                still_open.append(request)
            elif request.status is RequestStatus.FINISHED:
                self._outputs.append(request.num_output_tokens)
        self._open = still_open

    def _expected_rate(self, now_s: float, startup_s: float) -> float:
        """Return the requests/s to expect when a replica that is started now takes requests."""
        half_s = min(self.window_s, now_s) / 2
        num_late = sum(r.arrival_s > now_s - half_s for r in self._arrived)
        late, early = num_late / half_s, (len(self._arrived) - num_late) / half_s
        ahead_s = startup_s + half_s / 2  # from the middle of the late half
        return late + max(0.0, late - early) / half_s * ahead_s
