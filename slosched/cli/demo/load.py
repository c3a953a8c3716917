"""The promises and the rate that suit the machine on which the demo runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from slosched.cli import options
from slosched.cli.commands.replay import replay_live
from slosched.cli.console import console
from slosched.cli.demo.setup import (
    BASELINE,
    LABELS,
    LENGTH_SCALE,
    LIMITS,
    OVERLOAD,
    REPLICA,
    SPECS,
    TARGET,
    DemoError,
)
from slosched.core import SLO, BatchShape, RequestStatus
from slosched.evaluate.comparison import Replica
from slosched.metrics import RequestRecord
from slosched.perfmodel import FittedModel, scaled
from slosched.policy import FCFS
from slosched.simulator.simulate import simulate
from slosched.workload import Trace

_PROBES = 3
"""Bursts that are measured; a neighbour on the machine may slow down one of them."""
_PROBE_REQUESTS = 5
_PATIENT = SLO(ttft_s=3600.0, tpot_s=3600.0)
"""An SLO with which no policy drops a request, used instead of the server's default."""


@dataclass(frozen=True)
class Load:
    """The SLO and the rate of the requests that the demo sends."""

    slo: SLO
    rate: float
    capacity: float
    """Highest simulated rate in requests/s at which the baseline meets 90 % of the SLOs."""


def as_fast_as_now(model: FittedModel, url: str, seed: int) -> FittedModel:
    """Return the model, scaled to the median time that bursts of requests take on the server now.

    A machine that others use, too, may be faster or slower now than when it was profiled.
    """
    server = Replica.of(model, "of this machine", REPLICA, model.server_time)
    ratio = statistics.median(_slowness(server, url, seed + 1 + i) for i in range(_PROBES))
    console.print(
        f"The median of {_PROBES} bursts takes {ratio:.2f} times as long as the fitted model says: "
        "corrected."
    )
    return scaled(model, ratio)


def _slowness(server: Replica, url: str, seed: int) -> float:
    """Return how many times as long a burst of requests takes at `url` as on `server`, simulated.

    Raises DemoError if a request is not answered.
    """
    burst = _azure(_PROBE_REQUESTS, seed).scaled_to(1000.0).with_slo(_PATIENT)
    live = replay_live(burst, url, seed)
    if any(record.status is not RequestStatus.FINISHED for record in live):
        raise DemoError(f"the server at {url} did not answer a burst of {_PROBE_REQUESTS} requests")
    expected = simulate(burst, FCFS(), server.model, server.config)
    return _makespan_s(live) / _makespan_s([RequestRecord.from_request(r) for r in expected])


def _makespan_s(records: Sequence[RequestRecord]) -> float:
    return max(record.token_times_s[-1] for record in records)


def choose_load(model: FittedModel, num_requests: int, seed: int) -> Load:
    """Return SLOs that the machine meets unless it is overloaded, and a rate that overloads it.

    The TPOT is the time of a step in which half of `max_num_seqs` decode next to a small chunk.
    The TTFT is three times the prefill of a prompt at the 90th percentile of lengths, plus ten
    such steps of queueing.
    """
    trace = _azure(num_requests, seed)
    context = int(trace.prompt_tokens.mean() + trace.output_tokens.mean())
    step = BatchShape()
    step.add_decodes([context] * (LIMITS.max_num_seqs // 2))
    step.add(64, 0)
    tpot_s = model.predict(step)
    long_prompt = int(sorted(trace.prompt_tokens)[int(0.9 * len(trace))])
    slo = SLO(ttft_s=3 * model.predict_prefill(long_prompt) + 10 * tpot_s, tpot_s=tpot_s)
    capacity = _capacity(trace.with_slo(slo), model)
    return Load(slo, OVERLOAD * capacity, capacity)


def _azure(num_requests: int, seed: int) -> Trace:
    arrivals = options.TraceOptions(num_requests=num_requests, rate=1.0, length_scale=LENGTH_SCALE)
    return arrivals.open("azure_conv", None, seed)


def _capacity(trace: Trace, model: FittedModel) -> float:
    """Return the highest rate at which the baseline meets 90 % of the SLOs, as `capacity` does.

    Raise DemoError if no rate is low enough.
    """
    from slosched.evaluate.capacity import (  # slow to import
        Contender,
        Plan,
        Study,
        Sweep,
        local_pool,
    )

    server = Replica.of(model, "of this machine", REPLICA, model.server_time)
    contender = Contender(BASELINE, SPECS[BASELINE], server.model, server.model_name, server.config)
    sweep = Sweep([contender], [trace], Plan((TARGET,)))
    with console.status(f"searching the rate that {LABELS[BASELINE]} serves well"):
        sweep.run(local_pool(1))
    study = Study(list(sweep.measured.values()), [trace])
    found = study.capacity(BASELINE, TARGET).requests_per_s
    if not found > 0:
        raise DemoError(f"{LABELS[BASELINE]} keeps {TARGET:.0%} of the promises at no rate")
    return found
