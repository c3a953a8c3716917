"""The capacity of a running server: trials at rates that the search of the simulator chooses.

Imports the client of `slosched.replay`, which needs the extra `serve`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from slosched.core import SLO, DeadlineRule, RequestStatus
from slosched.evaluate.capacity.measured import Measured, Plan
from slosched.evaluate.capacity.outcomes import Outcomes
from slosched.evaluate.capacity.point import CapacityError
from slosched.evaluate.capacity.rates import Lattice
from slosched.replay.client import (
    ReplayError,
    ReplayOptions,
    ReplayReport,
    check_can_replay,
    replay,
)
from slosched.workload.trace import Trace, TraceRequest

_NUM_PROBES = 3
_LOWEST, _HIGHEST = 1 / 256, 4096.0
"""The range of the search, as multiples of the rate of a server that serves one at a time."""
_DRAIN_TIMEOUT_S = 60.0
"""The longest wait for a trial's last requests, and then for the server to be idle again."""
_IDLE_FACTOR, _IDLE_EXTRA_S = 2.0, 0.1
"""A server is idle if a request takes at most so many times as long as at first, and so much
longer."""
_PAUSE_S = 0.5
_PATIENT = SLO(ttft_s=3600.0, tpot_s=3600.0)
"""An SLO with which no policy rejects a request, used instead of the server's default."""

BY_CTRL_C = "Ctrl-C or SIGTERM"
OnProgress = Callable[[int, int], None]
"""A function that is called with the number of trials done and the expected total."""


class ServerGoneError(CapacityError):
    """The server no longer answers, or does not become idle after a trial."""


@dataclass(frozen=True)
class Effort:
    """What a search may cost at most; a trial that would cost more is not begun."""

    time_limit_s: float
    max_requests: int


@dataclass
class LiveSearch:
    """A search for the highest rates at which a running server reaches each target."""

    name: str
    url: str
    windows: Sequence[Trace]
    """The requests of a trial, one window for each repeat."""
    plan: Plan
    rule: DeadlineRule
    effort: Effort
    client: ReplayOptions = field(default_factory=ReplayOptions)
    trials: list[dict[str, object]] = field(default_factory=list)
    """A row for each trial that counts."""
    errors: Counter[str] = field(default_factory=Counter)
    """Counts of what went wrong in these trials besides rejections, by description."""
    measured: Measured = field(init=False)
    """What the trials gave, by rate and window."""
    why_stopped: str | None = None
    """Why the search ended before it was over; None if it did not."""

    def run(self, on_progress: OnProgress) -> None:
        """Warm the server up, and play trials until the search is over.

        Raises ReplayError if no server answers at first or a trace cannot be sent to any, and
        ServerGoneError if it does not serve a request alone.  What happens later only ends the
        search, with the reason in `why_stopped`.
        """
        for window in self.windows:
            check_can_replay(window)
        self._end_s = time.monotonic() + self.effort.time_limit_s
        self._num_sent = self._num_replays = 0
        self._first_seed = time.time_ns()
        self._alone_s = min(self._probe() for _ in range(_NUM_PROBES))
        self.measured = measured = self._measured()
        while wanted := measured.wanted():
            place, number = wanted[0]
            trial = self.windows[number].scaled_to(measured.lattice.rate(place))
            self.why_stopped = self._why_not(trial)
            if self.why_stopped:
                break
            try:
                outcomes = self._play(trial, number)
            except (ReplayError, ServerGoneError) as error:
                self.why_stopped = str(error)
                break
            except KeyboardInterrupt:
                self.why_stopped = BY_CTRL_C
                break
            measured.outcomes.setdefault(place, {})[number] = outcomes
            on_progress(measured.num_done, measured.num_done + measured.num_left())

    def _measured(self) -> Measured:
        one_at_a_time = 1 / self._alone_s
        low = self.plan.min_rate or _LOWEST * one_at_a_time
        high = self.plan.max_rate or _HIGHEST * one_at_a_time
        lattice = Lattice.between(min(low, high / 2), high, self.plan.precision)
        guess = lattice.nearest(2 * one_at_a_time)
        return Measured(self.name, self.plan, lattice, guess, len(self.windows))

    def _why_not(self, trial: Trace) -> str | None:
        """Return why a trial is not begun; None if there is time and there are requests for it."""
        if time.monotonic() + trial.duration_s > self._end_s:
            return f"the time limit of {self.effort.time_limit_s:g} s leaves no time for a trial"
        if self._num_sent + len(trial) > self.effort.max_requests:
            return f"the limit of {self.effort.max_requests} requests leaves none for a trial"
        return None

    def _play(self, trial: Trace, number: int) -> Outcomes:
        """Play a trial, wait until the server is idle again, and return the outcomes."""
        report = self._replay(trial)
        self._drain()
        outcomes = Outcomes.of_records(report.records, self.rule)
        self.errors.update(report.errors)
        self.trials.append(
            {
                "rate": trial.rate,
                "window": number,
                "num_offered": len(trial),
                "num_counted": int(outcomes.counted.sum()),
                "attainment": outcomes.attainment,
                "num_late_sends": report.num_late_sends,
                "max_lateness_s": report.max_lateness_s,
                "errors": "; ".join(f"{count} x {what}" for what, count in report.errors.items()),
            }
        )
        return outcomes

    def _replay(self, trial: Trace) -> ReplayReport:
        """Send a trial with new prompts.

        No prefix cache knows them from an earlier trial, nor from an earlier search.
        """
        seed = self._first_seed + self._num_replays
        options = replace(self.client, seed=seed, num_warmup=0, drain_timeout_s=_DRAIN_TIMEOUT_S)
        self._num_replays += 1
        self._num_sent += len(trial)
        return replay(trial, self.url, options)

    def _drain(self) -> None:
        """Wait until a request is served as fast as on the idle server."""
        end_s = time.monotonic() + _DRAIN_TIMEOUT_S
        while self._probe() > _IDLE_FACTOR * self._alone_s + _IDLE_EXTRA_S:
            if time.monotonic() > end_s:
                raise ServerGoneError(
                    f"{self.url} does not become idle: {_DRAIN_TIMEOUT_S:g} s after a trial a "
                    f"request still takes much longer than {self._alone_s:.2g} s"
                )
            time.sleep(_PAUSE_S)

    def _probe(self) -> float:
        """Return the seconds that the server takes for a request as long as the first, alone."""
        first = self.windows[0].requests[0]
        probe = TraceRequest(
            "probe", 0.0, first.num_prompt_tokens, first.num_output_tokens, _PATIENT
        )
        (record,) = self._replay(Trace.of([probe], "probe")).records
        if record.status is not RequestStatus.FINISHED or record.end_s is None:
            raise ServerGoneError(
                f"{self.url} does not serve a request alone: it ended as {record.status} "
                f"({record.end_reason})"
            )
        return record.end_s
