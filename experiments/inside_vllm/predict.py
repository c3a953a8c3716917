"""Simulations of the same heats, with a latency model that was fitted to vLLM's own steps."""

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
"""The most recorded steps that are fitted; thousands more add nothing."""
_SIGMA_PER_ERROR = math.sqrt(math.pi / 2)
"""The standard deviation of a normal distribution over its mean absolute error."""


@dataclass(frozen=True)
class Stretch:
    """The steps of one run, in the file to which a server writes those of all its runs."""

    recording: Path
    first: int
    num_steps: int


def num_steps(recording: Path) -> int:
    """Return the number of steps in the file so far."""
    if not recording.exists():
        return 0
    return len(read_profile(recording, may_be_empty=True).measurements)


def fitted(stretches: Sequence[Stretch], seed: int = 0) -> FitReport:
    """Fit a latency model to steps that slosched's scheduler class recorded while vLLM served.

    Raises MeasurementError if there is no recording, and FitError if it is not enough to fit.
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
    """Return the row that the simulator predicts for a run on `device`.

    Policies start with the setup's latency model.  `lag_s` is added to the time of a first token: a
    client sees it so much later than the engine's clock says.

    The device is as noisy as the steps were about its model.  This matters for policies that fill a
    step to the last millisecond that an SLO leaves.
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
    """Return what a server adds to TTFT before and after its engine, in seconds of wall time.

    `pairs` are measured and simulated runs.  The result is the median difference of their median
    TTFTs, at least 0.
    """
    apart_s = [float(run["ttft_p50_s"]) - float(str(guess["ttft_p50_s"])) for run, guess in pairs]
    return max(0.0, statistics.median(apart_s) * slowdown)
