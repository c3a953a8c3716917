"""Synthetic traces, with the statistics of public traces or by a simple rule.

The fitted kinds read `public_traces.json`, which `tools/fit_public_traces.py` makes.
"""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from slosched.core import NO_SLO, SLO
from slosched.workload.arrivals import (
    Arrivals,
    DailyArrivals,
    GammaArrivals,
    ModulatedPoisson,
    QuantileArrivals,
    WeibullArrivals,
)
from slosched.workload.lengths import (
    Fixed,
    IndependentLengths,
    LengthDistribution,
    LengthPairs,
    Lognormal,
    QuantileLengths,
)
from slosched.workload.long_trace import LongTrace
from slosched.workload.request import TraceRequest
from slosched.workload.sessions import AGENTS, Sessions
from slosched.workload.slo import SLORule
from slosched.workload.statistics import FloatArray, IntArray
from slosched.workload.trace import Trace

FITTED_KINDS = ("azure_conv", "azure_code", "mooncake_conv", "servegen_r1", "sharegpt")
INDEPENDENT_KINDS = ("poisson", "gamma", "weibull", "daily")
"""Kinds of trace whose requests do not depend on each other."""
SESSION_KINDS = ("sessions", "agents")
"""Kinds of trace whose prompts repeat earlier turns."""
KINDS = (*FITTED_KINDS, *INDEPENDENT_KINDS, *SESSION_KINDS)

DEFAULT_PROMPT = Lognormal(mean_tokens=512, cv=1.0)
DEFAULT_OUTPUT = Lognormal(mean_tokens=128, cv=1.0)
DEFAULT_CV = 2.0


def synthesize(
    kind: str,
    *,
    num_requests: int | None = None,
    duration_s: float | None = None,
    rate: float | None = None,
    seed: int = 0,
    slo: SLO | SLORule = NO_SLO,
    prompt: LengthDistribution | int | None = None,
    output: LengthDistribution | int | None = None,
    cv: float | None = None,
    sessions: Sessions | None = None,
) -> Trace:
    """Make a random trace of `num_requests` or `duration_s` seconds, at exactly `rate` requests/s.

    `rate` defaults to that of the fitted trace (1/s for the other kinds).  Time is scaled so that
    the realised rate is `rate` whatever the bursts are: traces of different seeds then offer the
    same load.  `prompt` and `output` (a distribution or a fixed number of tokens) are for
    `INDEPENDENT_KINDS`, `cv` (of the gaps, 2 by default) for `gamma` and `weibull`, and `sessions`
    for `SESSION_KINDS`.  Turns of the kind `agents` wait for each other (`think_s`); their own
    arrivals, and with them `rate`, are those of answers that take `Sessions.tpot_s` a token.
    Raises ValueError for anything that does not fit together.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of trace {kind!r}; choose one of {', '.join(KINDS)}")
    natural_rate = float(_tables()[kind]["rate"]) if kind in FITTED_KINDS else 1.0
    rate = natural_rate if rate is None else rate
    if not 0 < rate < math.inf:
        raise ValueError(f"rate must be a positive number of requests/s, not {rate!r}")
    size = _num_requests(num_requests, duration_s, rate)
    arrivals = _arrivals(kind, rate, cv)
    lengths = _lengths(kind, prompt, output)
    if sessions is not None and kind not in SESSION_KINDS:
        raise ValueError(f"sessions are for the kinds sessions and agents, not for {kind!r}")
    origin: dict[str, str | int | float] = {"kind": kind, "seed": seed}
    if kind == "agents":
        how = sessions or AGENTS
        requests = how.programs(size, rate, np.random.default_rng(seed))
        trace = Trace.of(requests, kind, origin | {"sessions": repr(how)}, how.block_tokens)
    elif arrivals is None or lengths is None:
        how = sessions or Sessions()
        requests = how.requests(size, rate, np.random.default_rng(seed))
        trace = Trace.of(requests, kind, origin | {"sessions": repr(how)}, how.block_tokens)
    else:
        if kind in INDEPENDENT_KINDS:
            origin |= {"arrivals": repr(arrivals), "lengths": repr(lengths)}
        trace = Trace.of(_requests(size, seed, arrivals, lengths), kind, origin)
    trace = trace.with_slo(slo)
    return trace.scaled_to(rate) if size > 1 else trace


def synthesize_long(
    kind: str, num_requests: int, rate: float, seed: int = 0, slo: SLO = NO_SLO
) -> LongTrace:
    """Make the trace that `synthesize` makes of these arguments, but as columns.

    It is for a kind whose requests do not depend on each other; raises ValueError for another.
    """
    if kind not in (*FITTED_KINDS, *INDEPENDENT_KINDS):
        raise ValueError(
            f"{kind!r} cannot be made as a long trace; choose one of "
            f"{', '.join((*FITTED_KINDS, *INDEPENDENT_KINDS))}"
        )
    if num_requests < 2 or not 0 < rate < math.inf:
        raise ValueError(
            f"a long trace needs at least two requests at a positive, finite rate, not "
            f"{num_requests} at {rate!r}/s"
        )
    arrivals, lengths = _arrivals(kind, rate, None), _lengths(kind, None, None)
    assert arrivals is not None
    assert lengths is not None
    times_s, prompts, outputs = _drawn(num_requests, seed, arrivals, lengths)
    times_s -= times_s[0]
    times_s *= (num_requests - 1) / times_s[-1] / rate
    return LongTrace(kind, np.arange(num_requests), times_s, prompts, outputs, slo)


def _requests(size: int, seed: int, arrivals: Arrivals, lengths: LengthPairs) -> list[TraceRequest]:
    times_s, prompts, outputs = _drawn(size, seed, arrivals, lengths)
    times_s -= times_s[0]  # as `Trace.of` would, one request after the other
    drawn = zip(times_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [TraceRequest(str(i), *values) for i, values in enumerate(drawn)]


def _drawn(
    size: int, seed: int, arrivals: Arrivals, lengths: LengthPairs
) -> tuple[FloatArray, IntArray, IntArray]:
    """Draw arrival times, prompt lengths and output lengths."""
    # Two random streams, so that other arrivals do not change the lengths, nor the reverse.
    arrival_rng, length_rng = np.random.default_rng(seed).spawn(2)
    # Machines differ in the last bit of a logarithm; rounded to microseconds, they agree.
    times_s = np.round(arrivals.times_s(size, arrival_rng), 6)
    return times_s, *lengths.draw(size, length_rng)


def fitted_summary(kind: str) -> dict[str, str | float]:
    """Return the `Trace.summary()` of the public trace that a fitted kind imitates."""
    if kind not in FITTED_KINDS:
        raise ValueError(f"{kind!r} is not fitted to a trace; choose {', '.join(FITTED_KINDS)}")
    return dict(_tables()[kind]["summary"])


def _num_requests(num_requests: int | None, duration_s: float | None, rate: float) -> int:
    if (num_requests is None) == (duration_s is None):
        raise ValueError("give either num_requests or duration_s, and not both")
    if duration_s is not None:
        if not 0 < duration_s < math.inf:
            raise ValueError(f"duration_s must be positive and finite, not {duration_s!r}")
        return max(1, round(rate * duration_s))
    if num_requests is None or num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, not {num_requests!r}")
    return num_requests


def _arrivals(kind: str, rate: float, cv: float | None) -> Arrivals | None:
    """Return the arrivals of the kind; None for sessions, whose turns wait for each other."""
    if cv is not None and kind not in ("gamma", "weibull"):
        raise ValueError(f"cv is for gamma and weibull arrivals; those of {kind!r} have their own")
    cv = DEFAULT_CV if cv is None else cv
    if kind in SESSION_KINDS:
        return None
    if kind == "daily":
        return DailyArrivals(rate)
    if kind == "weibull":
        return WeibullArrivals(cv)
    if kind in INDEPENDENT_KINDS:
        return GammaArrivals(1.0 if kind == "poisson" else cv)
    table = _tables()[kind]["arrivals"]
    if "gaps_s" in table:
        return QuantileArrivals(tuple(table["levels"]), tuple(table["gaps_s"]))
    modulation = tuple((variance, tau_s) for variance, tau_s in table["modulation"])
    return ModulatedPoisson(table["rate"], modulation)


def _lengths(
    kind: str, prompt: LengthDistribution | int | None, output: LengthDistribution | int | None
) -> LengthPairs | None:
    """Return the lengths of the kind; None for sessions, whose prompts repeat earlier turns."""
    if kind in INDEPENDENT_KINDS:
        return IndependentLengths(
            prompt=_distribution(prompt, DEFAULT_PROMPT),
            output=_distribution(output, DEFAULT_OUTPUT),
        )
    if prompt is not None or output is not None:
        raise ValueError(
            f"{kind!r} has lengths of its own: leave out prompt and output, or choose one of "
            f"{', '.join(INDEPENDENT_KINDS)}"
        )
    if kind in SESSION_KINDS:
        return None
    table = _tables()[kind]["lengths"]
    return QuantileLengths(
        prompt_levels=tuple(table["prompt_levels"]),
        prompt_quantiles=tuple(table["prompt_quantiles"]),
        output_levels=tuple(table["output_levels"]),
        output_quantiles=tuple(tuple(row) for row in table["output_quantiles"]),
    )


def _distribution(
    given: LengthDistribution | int | None, default: LengthDistribution
) -> LengthDistribution:
    if given is None:
        return default
    return Fixed(given) if isinstance(given, int) else given


@cache
def _tables() -> dict[str, Any]:
    text = files("slosched.workload").joinpath("public_traces.json").read_text(encoding="utf-8")
    tables: dict[str, Any] = json.loads(text)
    return tables
