"""The law that nobody pays for a promise that cannot be kept.

The same requests are played once with SLOs that the device can keep, and again with some of them
promised what no device of its kind could keep.  The other requests must not lose by it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache

import numpy as np

from slosched.core import SLO, DeadlineRule, Limits, Policy
from slosched.metrics import RequestRecord, is_good
from slosched.perfmodel import FittedModel, load_model
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.testing.plans import require
from slosched.workload import Trace, TraceRequest, synthesize
from slosched.workload.lengths import Lognormal

SHARES = (0.01, 0.1, 0.5)
"""Shares of the requests that are promised what cannot be kept."""
MOST_LOST = 0.01
"""Share of the others that may be lost; one request may be lost in any case."""
_KEEPABLE = SLO(ttft_s=1.0, tpot_s=0.05)
_NUM_REQUESTS, _REQUESTS_PER_S = 200, 20.0
_RULE = DeadlineRule.MEAN_TPOT


class Broken(StrEnum):
    """The part of an SLO that cannot be kept."""

    TTFT = "ttft"
    """Half the time that the prompt's prefill takes alone on the device."""
    TPOT = "tpot"
    """5 ms, while a decode alone takes more than 6."""
    BOTH = "both"


def check_others_unharmed(
    make_policy: Callable[[], Policy],
    *,
    shares: Sequence[float] = SHARES,
    parts: Iterable[Broken] = Broken,
) -> None:
    """Raise LawBrokenError if promises that cannot be kept cost the other requests theirs.

    200 requests arrive at an H100 with an 8B model, at a load that the device can serve.  Each of
    the `shares` of them is promised in turn what cannot be kept, in each of the `parts` of an SLO.
    Of the others at most 1 % may be lost because of that, or one request.
    """
    good = good_requests(make_policy(), requests())
    for broken in parts:
        for share in shares:
            chosen = chosen_requests(share)
            still_good = good_requests(make_policy(), with_unkeepable(broken, chosen))
            lost = (good - chosen) - still_good
            won = (still_good - chosen) - good
            num_others = _NUM_REQUESTS - len(chosen)
            require(
                len(lost) - len(won) <= max(1, MOST_LOST * num_others),
                f"{len(chosen)} requests with an SLO that cannot be kept ({broken.value}) cost "
                f"{len(lost) - len(won)} of {num_others} others theirs",
            )


def chosen_requests(share: float) -> set[str]:
    """Return the requests that are promised what cannot be kept, drawn with a fixed seed."""
    drawn = np.random.default_rng(0).permutation(_NUM_REQUESTS)[: round(share * _NUM_REQUESTS)]
    return {requests().requests[i].request_id for i in drawn}


@cache
def requests() -> Trace:
    """Return the requests, all with an SLO that can be kept."""
    return synthesize(
        "poisson",
        num_requests=_NUM_REQUESTS,
        rate=_REQUESTS_PER_S,
        slo=_KEEPABLE,
        prompt=Lognormal(1000, 1.0),
        output=Lognormal(200, 0.8),
    )


def with_unkeepable(broken: Broken, chosen: Collection[str]) -> Trace:
    """Return the requests, of which the `chosen` have an SLO that cannot be kept."""
    trace = requests()
    changed = [
        replace(r, slo=_unkeepable(r, broken)) if r.request_id in chosen else r
        for r in trace.requests
    ]
    return Trace.of(changed, f"{trace.name}, unkeepable", trace.provenance)


def good_requests(policy: Policy, trace: Trace) -> set[str]:
    """Return the requests whose SLO is kept when `policy` serves `trace`."""
    limits = Limits(deadline_rule=_RULE)
    done = simulate(trace, policy, _device(), SimulationConfig(limits=limits, num_blocks=30_000))
    records = map(RequestRecord.from_request, done)
    return {record.request_id for record in records if is_good(record, _RULE)}


def _unkeepable(request: TraceRequest, broken: Broken) -> SLO:
    prefill_s = _device().predict_prefill(request.num_prompt_tokens)
    slo = request.slo
    if broken != Broken.TPOT:
        slo = replace(slo, ttft_s=0.5 * prefill_s)
    return slo if broken == Broken.TTFT else replace(slo, tpot_s=0.005)


@cache
def _device() -> FittedModel:
    return load_model("h100/llama-3.1-8b")
