"""Metrics of a replay's steps: queues, batches, memory, and errors of the predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter

import numpy as np

from slosched.metrics.columns import FloatArray
from slosched.metrics.records import StepRow


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One row about the steps of one replay.

    Means of queues, KV cache and the busy share are over the time from the first step's start to
    the last step's end; between steps nothing counts as waiting or running. Means of batches are
    over steps.
    """

    num_steps: int
    busy_share: float
    """Share of the time in which the device computed."""
    mean_waiting: float
    max_waiting: int
    mean_running: float
    max_running: int
    max_swapped: int
    mean_kv_used: float
    """Share of the KV blocks, as is `max_kv_used`."""
    max_kv_used: float
    mean_batch_tokens: float
    mean_batch_decodes: float
    mean_step_s: float
    prediction_error: float
    """Mean of |predicted / actual - 1| over the steps that were predicted; NaN if none was."""

    def as_row(self) -> dict[str, float]:
        """Return the figures for one row of a DataFrame, next to `Summary.as_row`."""
        return asdict(self)


def summarize_steps(steps: Sequence[StepRow]) -> StepSummary:
    """Summarize the steps of one replay, given in their order; raise ValueError without steps."""
    if not steps:
        raise ValueError("there are no steps to summarize: the replay executed nothing")
    duration_s = _column(steps, "duration_s")
    time_s = steps[-1].start_s + steps[-1].duration_s - steps[0].start_s
    waiting, running = _column(steps, "num_waiting"), _column(steps, "num_running")
    kv_used, decodes = _column(steps, "kv_used_fraction"), _column(steps, "num_decodes")

    def over_time(values: FloatArray) -> float:
        return float(values @ duration_s) / time_s if time_s > 0 else math.nan

    return StepSummary(
        num_steps=len(steps),
        busy_share=over_time(np.ones(len(steps))),
        mean_waiting=over_time(waiting),
        max_waiting=int(waiting.max()),
        mean_running=over_time(running),
        max_running=int(running.max()),
        max_swapped=int(_column(steps, "num_swapped").max()),
        mean_kv_used=over_time(kv_used),
        max_kv_used=float(kv_used.max()),
        mean_batch_tokens=float((_column(steps, "num_prefill_tokens") + decodes).mean()),
        mean_batch_decodes=float(decodes.mean()),
        mean_step_s=float(duration_s.mean()),
        prediction_error=_prediction_error(steps),
    )


def _prediction_error(steps: Sequence[StepRow]) -> float:
    errors = [
        abs(step.predicted_s / step.duration_s - 1)
        for step in steps
        if step.predicted_s is not None and step.duration_s > 0
    ]
    return float(np.mean(errors)) if errors else math.nan


def _column(steps: Sequence[StepRow], name: str) -> FloatArray:
    return np.fromiter(map(attrgetter(name), steps), dtype=np.float64, count=len(steps))
