"""The speed that a device had while a server ran, so that a simulation can have the same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slosched.core import LatencyModel
from slosched.perfmodel import Measurement
from slosched.simulator.disturbances import Disturbances

WINDOW_S = 2.0
"""Time over which the speed is averaged; neighbours on a machine come and go in seconds."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step of a server, and when it ended, in seconds of the replay."""

    ended_s: float
    measured: Measurement


def in_replay_time(steps: Sequence[TimedStep], last_end_s: float) -> list[TimedStep]:
    """Return the steps of a replay, in whose time the last of `steps` ended at `last_end_s`.

    What the server ran before the replay began at 0, to warm up, is left out.
    """
    shift_s = last_end_s - steps[-1].ended_s if steps else 0.0
    moved = [replace(step, ended_s=step.ended_s + shift_s) for step in steps]
    return [step for step in moved if step.ended_s > 0]


def measured_speed(steps: Sequence[TimedStep], model: LatencyModel) -> Disturbances:
    """Return how much slower than `model` the steps were, window by window, and how they scatter.

    Raises ValueError if there are no steps.
    """
    if not steps:
        raise ValueError("no step was recorded, so nothing says how fast the device was")
    windows: dict[int, list[tuple[float, float]]] = {}
    for step in steps:
        window = math.floor((step.ended_s - step.measured.seconds) / WINDOW_S)
        times_s = (step.measured.seconds, model.predict(step.measured.shape))
        windows.setdefault(window, []).append(times_s)
    slowness = {
        window: sum(seconds for seconds, _ in times) / sum(predicted for _, predicted in times)
        for window, times in sorted(windows.items())
    }
    scatter = [
        math.log(seconds / (predicted * slowness[window]))
        for window, times in windows.items()
        for seconds, predicted in times
    ]
    return Disturbances(
        noise=statistics.pstdev(scatter),
        slowness=tuple((window * WINDOW_S, factor) for window, factor in slowness.items()),
    )


def mean_slowness(steps: Sequence[TimedStep], model: LatencyModel) -> float:
    """Return how many times as long the steps took as `model` says."""
    predicted_s = sum(model.predict(step.measured.shape) for step in steps)
    return sum(step.measured.seconds for step in steps) / predicted_s
