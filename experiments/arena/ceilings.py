"""Ceilings of a capacity: the highest rates at which bounds leave an attainment possible.

There are two bounds, which no schedule exceeds on a device without noise: L1 and L2 over the
windows as they are, and L5 for windows that are repeated without end.  A third figure is no bound:
the rate that an even stream could have, in which all requests are like the mean and all steps
alike.

For overload, the module gives what L5 leaves possible at each load.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.optimize import bisect

from experiments.arena.ring import undisturbed
from experiments.arena.rows import Row
from experiments.arena.scenarios import LOADS, Scale, Scenario
from slosched.core import BatchShape
from slosched.evaluate.bounds import Pace, demand_of, fluid_bound, on_time_bound
from slosched.evaluate.capacity import TARGETS
from slosched.perfmodel import FittedModel
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace

ON_TIME, LASTING, EVEN_STREAM = "L1 and L2", "L5 pace", "even stream"
_TOLERANCE = 0.01
_RANGE = 64.0
"""The range of the search: rates so many times lower and higher than the trace's own."""


def ceilings(scenario: Scenario, scale: Scale) -> list[Row]:
    """Return a row for each target and bound, over all windows that judge, in requests/s."""
    model = scenario.device()
    config = undisturbed(scenario.config(model))
    windows = scenario.windows(scale)
    kv_tokens = config.kv_tokens
    demands = [demand_of(w, model, config.limits, kv_tokens) for w in windows]
    paces = [Pace(w, model, config.limits, kv_tokens) for w in windows]
    even = _even_rate(windows, model, config)

    def on_time(rate: float) -> int:
        fast = [d.at_speed(rate / w.rate) for d, w in zip(demands, windows, strict=True)]
        return sum(min(fluid_bound(d).num_good, on_time_bound(d).num_good) for d in fast)

    def lasting(rate: float) -> int:
        return sum(pace.bound(rate).num_good for pace in paces)

    num_offered = sum(len(w) for w in windows)
    rows: list[Row] = []
    for target in TARGETS:
        enough = math.ceil(target * num_offered) - 0.5
        for name, good in ((ON_TIME, on_time), (LASTING, lasting)):
            rate = _crossing(good, windows[0].rate, enough)
            rows.append({"target": target, "bound": name, "requests_per_s": rate})
    rows.append({"target": math.inf, "bound": EVEN_STREAM, "requests_per_s": even})
    return rows


def lasting(scenario: Scenario, scale: Scale, knee: float) -> list[Row]:
    """Return the most good requests at each load if the windows were repeated without end."""
    model = scenario.device()
    config = undisturbed(scenario.config(model))
    windows = scenario.overload_windows(scale)
    paces = [Pace(w, model, config.limits, config.kv_tokens) for w in windows]
    num_offered = sum(len(w) for w in windows)
    return [
        {
            "load": load,
            "rate": load * knee,
            "num_offered": num_offered,
            "num_good": sum(pace.bound(load * knee).num_good for pace in paces),
        }
        for load in LOADS
    ]


def _crossing(falls: Callable[[float], float], around: float, to: float = 0.0) -> float:
    """Return the rate at which `falls` comes down to `to`; 0 or inf if it is out of range."""

    def at(log_rate: float) -> float:
        return falls(math.exp(log_rate)) - to

    low, high = math.log(around / _RANGE), math.log(around * _RANGE)
    if at(low) <= 0:
        return 0.0
    if at(high) > 0:
        return math.inf
    return math.exp(bisect(at, low, high, xtol=_TOLERANCE))


def _even_rate(windows: list[Trace], model: FittedModel, config: SimulationConfig) -> float:
    """Return the requests/s of an even stream that needs every seat.

    It has a step for every token at the mean TPOT of the SLOs.  Every step holds one token of each
    request that decodes, and an equal share of the prompts.
    """
    requests = [r for w in windows for r in w.requests]
    num = len(requests)
    prompt = sum(r.num_prompt_tokens for r in requests) / num
    pairs = sum(r.num_prompt_tokens * (r.num_prompt_tokens + 1) / 2 for r in requests) / num
    later = sum(r.num_output_tokens - 1 for r in requests) / num
    contexts = (
        sum(
            (r.num_output_tokens - 1) * (r.num_prompt_tokens + r.num_output_tokens / 2)
            for r in requests
        )
        / num
    )
    span_s = sum(r.slo.ttft_s + (r.num_output_tokens - 1) * r.slo.tpot_s for r in requests) / num

    def spare_s(rate: float) -> float:
        """Return the time that remains of the longest step that the SLOs allow."""
        step_s = span_s / later if later else 1.0
        if later:
            step_s = min(step_s, config.limits.max_num_seqs / (rate * later))
        return step_s - model.predict(_shape(rate * step_s, prompt, pairs, later, contexts))

    return _crossing(spare_s, windows[0].rate)


def _shape(num: float, prompt: float, pairs: float, later: float, contexts: float) -> BatchShape:
    """Return a step with the prompts and decodes of `num` requests."""
    shape = BatchShape()
    decodes = max(1, round(num * later))
    shape.add_decodes([round(contexts / max(later, 1.0))] * decodes)
    tokens = max(2, round(num * prompt))
    prior = max(0, round(pairs / prompt - tokens / 2))
    shape.add(tokens, prior)
    return shape
