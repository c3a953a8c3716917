"""Simulations of the same heats, with a latency model that was fitted to vLLM's own steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.inside_vllm.heats import Heat, Row, identity, scores
from experiments.inside_vllm.setups import Setup, System
from slosched.metrics import RequestRecord
from slosched.perfmodel import (
    NO_SERVER_TIME,
    FitReport,
    FittedModel,
    Measurement,
    Profile,
    ServerTime,
    fit,
    read_profile,
)
from slosched.perfmodel.forms import described
from slosched.perfmodel.server_time import SERVER_TIME_ORIGIN
from slosched.policy.spec import make_policy
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import simulate

_MAX_FITTED = 1000
"""The most recorded steps that are fitted; thousands more add nothing."""
_TRIAL_S = 0.01
"""The host's time for a step with which runs are simulated to see how much it slows them down."""


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


def predicted(heat: Heat, system: System, device: FittedModel) -> Row:
    """Return the row that the simulator predicts for a run on `device` and in its server.

    Policies start with the setup's latency model, which knows nothing of the server.  So they plan
    for the engine's clock, and a client sees its first token `per_request_s` later.  The host's
    time is hidden if vLLM plans ahead, and no policy learns it from the steps.

    Steps scatter as they did about the fitted model.  This matters for policies that fill a step to
    the last millisecond that an SLO leaves.
    """
    setup: Setup = heat.setup
    server = device.server_time
    config = replace(
        setup.simulation(system),
        disturbances=Disturbances(device.noise),
        schedule_s=server.per_step_host_s,
    )
    requests = simulate(
        setup.load(heat.rate, heat.window),
        make_policy(system.simulated_policy),
        device,
        config,
        scheduler_model=setup.model,
    )
    records = [RequestRecord.from_request(request) for request in requests]
    seen = [replace(r, arrival_s=r.arrival_s - server.per_request_s) for r in records]
    learnt = {"per_request_s": server.per_request_s, "per_step_host_s": server.per_step_host_s}
    return {**identity(heat, system), **scores(setup, seen), **learnt}


Guess = Callable[[FittedModel], Sequence[Row]]
"""A function that simulates some measured runs on a device, in the order of the runs."""


def with_server_time(
    device: FittedModel, setup: Setup, runs: Sequence[Mapping[Hashable, Any]], guess: Guess
) -> FittedModel:
    """Return the device with what its server adds, learnt from `runs` at the lowest rate.

    There hardly any request waits.  The host's time for a step is what makes the simulated runs
    take as long as the measured ones, on average; if vLLM plans ahead, it is hidden and stays 0.
    The time per request is then the median difference of the runs' median TTFTs.  Both are in
    seconds of wall time and at least 0.
    """
    rate = min(run["rate"] for run in runs)
    origin = f"learnt from the {len(runs)} runs at {rate:g}/s, the lowest rate"
    facts = {**device.provenance, SERVER_TIME_ORIGIN: origin}

    def served(times: ServerTime) -> FittedModel:
        return described(device, facts, device.held_out_error, server_time=times)

    host_s = 0.0
    if not setup.is_emulated:
        trial = served(ServerTime(per_step_host_s=_TRIAL_S))
        without, with_it = (_haste(runs, guess(d)) for d in (served(NO_SERVER_TIME), trial))
        host_s = max(0.0, _TRIAL_S * without / (without - with_it))
    stepping = ServerTime(per_step_host_s=host_s)
    pairs = zip(runs, guess(served(stepping)), strict=True)
    late_s = [float(run["ttft_p50_s"]) - float(str(row["ttft_p50_s"])) for run, row in pairs]
    per_request_s = max(0.0, statistics.median(late_s) * setup.slowdown)
    return served(replace(stepping, per_request_s=per_request_s))


def _haste(runs: Sequence[Mapping[Hashable, Any]], rows: Sequence[Row]) -> float:
    """Return by how much simulated runs are faster, as the mean logarithm of the token rates."""
    return statistics.fmean(
        math.log(float(str(row["tokens_per_s"])) / float(run["tokens_per_s"]))
        for run, row in zip(runs, rows, strict=True)
    )
