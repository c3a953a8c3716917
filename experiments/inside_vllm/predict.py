"""The same heats, simulated, with a latency model that was fitted to vLLM's own steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.inside_vllm.heats import Heat, Row, identity, scores
from experiments.inside_vllm.setups import Setup, System
from slosched.metrics import RequestRecord
from slosched.perfmodel import FitReport, FittedModel, Measurement, Profile, fit, read_profile
from slosched.policy.spec import make_policy
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import simulate

_MAX_FITTED = 1000
"""Recorded steps that are fitted; thousands more tell the same."""
_SIGMA_PER_ERROR = math.sqrt(math.pi / 2)
"""Of a normal distribution: its standard deviation over its mean absolute error."""


@dataclass(frozen=True)
class Stretch:
    """The steps of one run, in the file to which a server writes those of all its runs."""

    recording: Path
    first: int
    num_steps: int


def num_steps(recording: Path) -> int:
    """In the file so far."""
    if not recording.exists():
        return 0
    return len(read_profile(recording, may_be_empty=True).measurements)


def fitted(stretches: Sequence[Stretch], seed: int = 0) -> FitReport:
    """Of steps that slosched's scheduler class recorded while vLLM served.

    Raises MeasurementError if there is no recording, FitError if it tells too little.
    """
    recordings = dict.fromkeys(stretch.recording for stretch in stretches)
    profiles = {path: read_profile(path) for path in recordings}
    rows: list[Measurement] = []
    for part in stretches:
        measured = profiles[part.recording].measurements
        rows += measured[part.first : part.first + part.num_steps]
    if len(rows) > _MAX_FITTED:
        chosen = np.random.default_rng(seed).choice(len(rows), _MAX_FITTED, replace=False)
        rows = [rows[i] for i in sorted(chosen)]
    return fit(Profile(tuple(rows), next(iter(profiles.values())).provenance))


def predicted(heat: Heat, system: System, device: FittedModel, lag_s: float = 0.0) -> Row:
    """What the simulator says of a run on `device`; policies start with a model of their own.

    `lag_s` is how much later than the engine's clock a client's says that a first token came.

    The device is as noisy as the steps were about its model: whoever fills a step to the last
    millisecond that a promise leaves depends on it.
    """
    setup: Setup = heat.setup
    noise = _SIGMA_PER_ERROR * device.held_out_error.get("mape", 0.0) / 100
    requests = simulate(
        setup.load(heat.rate, heat.window),
        make_policy(system.simulated_policy),
        device,
        replace(setup.simulation(system), disturbances=Disturbances(noise)),
        scheduler_model=setup.model,
    )
    records = [RequestRecord.from_request(request) for request in requests]
    seen = [replace(record, arrival_s=record.arrival_s - lag_s) for record in records]
    return {**identity(heat, system), **scores(setup, seen), "lag_s": lag_s}


def lag(pairs: Sequence[tuple[Mapping[Hashable, Any], Row]], slowdown: float) -> float:
    """What a server adds to a first token before and behind its engine, in seconds of the wall.

    `pairs` are runs, measured and simulated: the median of what lies between their median TTFTs.
    """
    apart_s = [float(run["ttft_p50_s"]) - float(str(guess["ttft_p50_s"])) for run, guess in pairs]
    return max(0.0, statistics.median(apart_s) * slowdown)
