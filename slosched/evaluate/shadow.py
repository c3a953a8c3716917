"""What a policy would have gained on the traffic that a server in shadow mode wrote down.

The latency model is fitted to the server's own steps.  The recorded arrivals are then replayed in
the simulator, open loop, once under vLLM's scheduler and once under the policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from slosched.core import NO_SLO, SLO, Limits, SloschedError
from slosched.evaluate.capacity.windows import blocks_of
from slosched.evaluate.statistics import NUM_REPLICATES, Interval, block_weights, interval
from slosched.kv import PrefixCaching
from slosched.metrics import RequestColumns, RequestRecord, Summary, good_requests, summarize
from slosched.metrics.columns import BoolArray
from slosched.perfmodel import AUTO, FitError, FitReport, fit
from slosched.policy.spec import make_policy
from slosched.replay.shadow import ServerFacts, ShadowRun
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace

_THEIRS = "vllm_v1"
"""The policy that decides as vLLM's own scheduler does."""


class NothingToJudgeError(SloschedError, ValueError):
    """A run in shadow mode does not say enough for a report."""


class Gain(NamedTuple):
    """The good requests that a policy serves more than vLLM's scheduler, as a share of those."""

    share: float
    interval: Interval | None
    """The 95 % interval of `share` over the blocks of the recorded traffic; it knows nothing of
    the simulator's own error.  None if all requests came at one time, in a single block."""


@dataclass(frozen=True)
class ShadowReport:
    """A recorded run, and the replays of its arrivals."""

    policy: str
    model: FitReport
    measured: Summary
    """What vLLM did, as it was recorded."""
    theirs: Summary
    """The replay under vLLM's scheduler; close to `measured` if the simulator can be trusted."""
    ours: Summary
    """The replay under the policy."""
    gain: Gain | None
    """None if no request is good under vLLM's scheduler."""


def judge(
    run: ShadowRun,
    policy: str | None = None,
    *,
    slo: SLO = NO_SLO,
    load: float = 1.0,
    form: str = AUTO,
    seed: int = 0,
) -> ShadowReport:
    """Replay a recorded run under vLLM's scheduler and under `policy` (default: the run's own).

    Requests that were recorded without an SLO get `slo`.  The arrivals come `load` times as fast
    as they were recorded.  `form` is that of the latency model, as for `slosched fit`.  Raises
    NothingToJudgeError if no request has an SLO, and if the steps do not suffice to fit a model,
    and TraceError for a `load` of requests that all came at one time.
    """
    recorded = _promised(run.trace, slo)
    if all(request.slo == NO_SLO for request in recorded.requests):
        raise NothingToJudgeError(
            "no recorded request has an SLO, so every answer is in time: give --slo-ttft and "
            "--slo-tpot"
        )
    rule, name = run.server.deadline_rule, policy or run.server.policy
    make_policy(name)  # before the fit, which takes seconds
    trace = recorded if load == 1 else recorded.scaled_to(recorded.own_rate() * load)
    try:
        model = fit(run.profile, form, seed=seed)
    except FitError as error:
        raise NothingToJudgeError(
            f"the {len(run.profile.measurements)} recorded steps do not suffice: {error}; record "
            "more traffic"
        ) from error
    theirs, ours = (
        [
            RequestRecord.from_request(request)
            for request in simulate(trace, make_policy(spec), model.model, _replica(run.server))
        ]
        for spec in (_THEIRS, name)
    )
    good_theirs, good_ours = (
        good_requests(RequestColumns.of(records), rule) for records in (theirs, ours)
    )
    return ShadowReport(
        policy=name,
        model=model,
        measured=summarize(_measured(run, recorded), rule),
        theirs=summarize(theirs, rule),
        ours=summarize(ours, rule),
        gain=_gain(trace, good_theirs, good_ours, seed),
    )


def _promised(trace: Trace, slo: SLO) -> Trace:
    """Return the trace with `slo` for the requests that have none."""
    requests = (replace(r, slo=slo) if r.slo == NO_SLO else r for r in trace.requests)
    return replace(trace, requests=tuple(requests))


def _measured(run: ShadowRun, trace: Trace) -> list[RequestRecord]:
    """Return the recorded outcomes, each with the SLO that it has in `trace`."""
    slo_of = {request.request_id: request.slo for request in trace.requests}
    return [replace(record, slo=slo_of[record.request_id]) for record in run.records]


def _replica(server: ServerFacts) -> SimulationConfig:
    return SimulationConfig(
        limits=Limits(
            max_num_batched_tokens=server.max_num_batched_tokens,
            max_num_seqs=server.max_num_seqs,
            max_chunk_tokens=server.max_chunk_tokens,
            num_watermark_blocks=server.num_watermark_blocks,
            deadline_rule=server.deadline_rule,
        ),
        num_blocks=server.num_blocks,
        block_size=server.block_size,
        prefix_cache=PrefixCaching.HASH if server.caches_prefixes else PrefixCaching.OFF,
        online=True,
        overlap=server.plans_ahead,
    )


def _gain(trace: Trace, theirs: BoolArray, ours: BoolArray, seed: int) -> Gain | None:
    """Return the gain, with an interval from blocks of requests that follow one another.

    Both replays saw the same blocks, so that the comparison is paired.
    """
    blocks = blocks_of(trace)
    num_blocks = int(blocks.max()) + 1
    theirs_by, ours_by = (
        np.bincount(blocks, weights=good, minlength=num_blocks) for good in (theirs, ours)
    )
    if not theirs.any():
        return None
    share = float(ours.sum() / theirs.sum() - 1)
    if num_blocks == 1:
        return Gain(share, None)
    weights = block_weights(np.zeros(num_blocks, dtype=np.int64), NUM_REPLICATES, seed)
    drawn_theirs, drawn_ours = weights @ theirs_by, weights @ ours_by
    replicates = drawn_ours / np.maximum(drawn_theirs, 1.0) - 1
    return Gain(share, interval(replicates, share, num_seeds=1))
