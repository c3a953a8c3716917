"""The watchdog, which distinguishes a step that hangs from one that only takes long.

The engine's thread reports when it begins and ends a step.  Callers of `hang`, and a thread that
checks about once a second, compare how long the step has run with its predicted time.  A hang is
logged when it is first seen and when it is over.  One that lasts too long is given up.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from slosched.core import ScheduledBatch
from slosched.engine.loop import Engine

log = logging.getLogger(__name__)

_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class StepLimit:
    """The time that a step may take before it counts as hung."""

    timeout_s: float = 10.0
    """The shortest limit in seconds, whatever was predicted; infinite for no limit at all."""
    times_predicted: float = 20.0
    """The limit as a multiple of the predicted time, if that is longer."""
    warmup_timeout_s: float = 300.0
    """The shortest limit of the first steps, which load and compile what later ones only run."""
    num_warmup_steps: int = 8
    give_up_after_s: float = 60.0
    """How long a step may hang, beyond its limit, until nobody waits for it any more; infinite for
    as long as it takes."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "times_predicted", "warmup_timeout_s", "give_up_after_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)!r}")

    def of_step(self, predicted_s: float | None, num_ended: int) -> float:
        """Return the seconds that a step may take; `num_ended` steps have ended before it."""
        limit_s = max(self.timeout_s, self.times_predicted * (predicted_s or 0.0))
        return max(limit_s, self.warmup_timeout_s) if num_ended < self.num_warmup_steps else limit_s


class Hang(NamedTuple):
    """A step that has taken longer than its limit."""

    batch: ScheduledBatch | None
    """The batch that the device runs; None if the engine's own thread hangs."""
    running_s: float
    limit_s: float

    @property
    def predicted_s(self) -> float | None:
        return None if self.batch is None else self.batch.predicted_s

    @property
    def reason(self) -> str:
        """Return what hangs, for how long, and how long it should have taken."""
        allowed = f"{self.limit_s:.3g} s are allowed (--step-timeout)"
        if self.batch is None:
            return f"a step has been planned or booked for {self.running_s:.1f} s; {allowed}"
        predicted_s = self.predicted_s
        expected = "nothing was" if predicted_s is None else f"{predicted_s:.3g} s were"
        shape = self.batch.shape
        return (
            f"the device has not ended a step for {self.running_s:.1f} s; {expected} predicted and "
            f"{allowed}; requests in the step: {len(self.batch.chunks)}, "
            f"prefill tokens: {shape.num_prefill_tokens}, decodes: {shape.num_decodes}"
        )


class Watchdog:
    """Watches the steps of one engine.  `began` and `ended` are for the engine's thread alone."""

    def __init__(self, engine: Engine, limit: StepLimit) -> None:
        self._engine = engine
        self._limit = limit
        self._began_s: float | None = None
        """The time when the engine's thread began its current step; None between steps."""
        self._num_ended = 0
        self._lock = threading.Lock()
        self._hung_since_s: float | None = None
        """The time when the step that is known to hang began; None if none hangs."""
        self.num_hangs = 0
        """The number of hangs seen so far."""

    def began(self) -> None:
        self._began_s = self._engine.clock.now_s()

    def ended(self) -> None:
        self._began_s = None
        self._num_ended += 1
        if self._hung_since_s is not None:
            self.hang()

    def hang(self) -> Hang | None:
        """Return the step that hangs now; log the beginning and the end of a hang."""
        with self._lock:
            now_s = self._engine.clock.now_s()
            found = self._find(now_s)
            if found is not None and self._hung_since_s is None:
                self._hung_since_s = now_s - found.running_s
                self.num_hangs += 1
                log.error("hung: %s", found.reason)
            elif found is None and self._hung_since_s is not None:
                took_s = now_s - self._hung_since_s
                self._hung_since_s = None
                log.warning("no longer hung: the step that hung ended after %.1f s", took_s)
            return found

    def run(self, stopped: threading.Event, give_up: Callable[[str], None]) -> None:
        """Watch until `stopped` is set, so that the log shows hangs even if nobody asks.

        Calls `give_up` with the reason when a step hangs for too long.
        """
        if self._limit.timeout_s == math.inf:
            return
        while not stopped.wait(_PERIOD_S):
            found = self.hang()
            if found and found.running_s > found.limit_s + self._limit.give_up_after_s:
                give_up(f"a step was given up: {found.reason}")
                return

    def _find(self, now_s: float) -> Hang | None:
        """Return the step that hangs, if any.

        Reads each value only once, the clock first, because the engine's thread runs on.
        """
        began_s = self._began_s
        batch, since_s = self._engine.waits_for
        if began_s is None:
            return None
        running_s = now_s - max(began_s, since_s)
        limit_s = self._limit.of_step(None if batch is None else batch.predicted_s, self._num_ended)
        return Hang(batch, running_s, limit_s) if running_s > limit_s else None
