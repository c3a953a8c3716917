"""The same heats, simulated, with a latency model that was fitted to vLLM's own steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.inside_vllm.heats import Heat, Row, identity, scores
from experiments.inside_vllm.setups import Setup, System
from slosched.engine.simulate import simulate
from slosched.evaluate.metrics import RequestRecord
from slosched.perfmodel import FitReport, FittedModel, Measurement, Profile, fit, read_profile
from slosched.policy.spec import make_policy

_MAX_FITTED = 400
"""Steps of a recording that are fitted; thousands more tell the same."""


def fitted(recordings: list[Path], seed: int = 0) -> FitReport:
    """Of the steps that slosched's scheduler class recorded while vLLM served.

    Raises MeasurementError if there is no recording, FitError if it tells too little.
    """
    profiles = [read_profile(path) for path in recordings]
    rows: list[Measurement] = [m for profile in profiles for m in profile.measurements]
    if len(rows) > _MAX_FITTED:
        chosen = np.random.default_rng(seed).choice(len(rows), _MAX_FITTED, replace=False)
        rows = [rows[i] for i in sorted(chosen)]
    return fit(Profile(tuple(rows), profiles[0].provenance))


def predicted(heat: Heat, system: System, device: FittedModel) -> Row:
    """What the simulator says of a run on `device`; policies start with a model of their own."""
    setup: Setup = heat.setup
    requests = simulate(
        setup.load(heat.rate, heat.window),
        make_policy(system.simulated_policy),
        device,
        setup.simulation(system),
        scheduler_model=setup.model,
    )
    records = [RequestRecord.from_request(request) for request in requests]
    return {**identity(heat, system), **scores(setup, records)}
