"""The least work that each request of a trace needs, and the times by which it is due."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from slosched.core import MAX_LATE_GAP_SHARE, TOLERANCE_S, BatchShape, DeadlineRule, Limits
from slosched.evaluate.bounds.prices import FloatArray, StepPrices, StepTimes, legal_steps
from slosched.workload.trace import Trace, TraceRequest

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Demand:
    """The requests that could be good at all.  Arrays have shape (number of these requests,)."""

    num_offered: int
    window_s: float
    """The time over which the load was offered (`metrics.offered_window_s`)."""
    release_s: FloatArray
    first_due_s: FloatArray
    last_due_s: FloatArray
    """The latest time of the last token of a good request; inf if no SLO limits it."""
    first_work_s: FloatArray
    """Device time for the prompt, due with the first token."""
    rest_work_s: FloatArray
    """Device time for all later tokens, due with the last one."""
    index: IntArray
    """The index of each of these requests in the trace."""
    num_devices: float = 1.0
    """The device time that there is in each second, in seconds."""

    def at_speed(self, factor: float) -> Demand:
        """Return the same requests arriving `factor` times as fast, as by `Trace.scaled_to`."""
        moved_s = self.release_s / factor - self.release_s
        return replace(
            self,
            window_s=self.window_s / factor,
            release_s=self.release_s + moved_s,
            first_due_s=self.first_due_s + moved_s,
            last_due_s=self.last_due_s + moved_s,
        )


def demand_of(
    trace: Trace, model: StepTimes, limits: Limits, kv_tokens: int | None = None
) -> Demand:
    """Return each request's least work at the model's step prices, and its due times.

    Due times follow the goodput metric of `limits.deadline_rule`.  Every prompt token is computed
    in some step before the first token is out.  Every later token takes one decode or, if the
    request was preempted, all tokens before it anew, whichever is cheaper.

    Requests that not even an idle device can serve well are left out.  They do not fit into a KV
    cache of `kv_tokens` (None: it has no end), or their TTFT is below the work of their prompt or
    the shortest step.  Under the rules that bank no slack, a TPOT below the shortest step excludes
    a request as well.

    Assumes steps that take the time that `model` predicts (no noise, no drift), one replica that
    runs one step at a time, and no prefix cache.
    """
    longest = longest_context(trace)
    prices = legal_steps(model, limits, longest, kv_tokens).dearest(token_weights(trace))
    return demand_at(prices, shortest_step_s(model), trace, limits, kv_tokens)


def longest_context(trace: Trace) -> int:
    """Return the longest context of any step, in tokens; a request's last token is not computed."""
    return int((trace.prompt_tokens + trace.output_tokens).max()) - 1


def token_weights(trace: Trace) -> FloatArray:
    """Return the trace's total of what `StepPrices` prices: t, Bd, t2, t3, and no steps."""
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    pairs = prompts * (prompts + 1) / 2
    contexts = (outputs - 1) * (prompts + outputs / 2)
    needs = [prompts.sum(), (outputs - 1).sum(), pairs.sum(), contexts.sum(), 0]
    return np.array(needs, dtype=np.float64)


def demand_at(
    prices: StepPrices, shortest_s: float, trace: Trace, limits: Limits, kv_tokens: int | None
) -> Demand:
    """Do what `demand_of` does, with prices and a shortest step that are known to hold."""
    if kv_tokens is not None and kv_tokens < 1:
        raise ValueError(f"the KV cache needs kv_tokens >= 1 or None, not {kv_tokens}")
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    first_work_s, rest_work_s = work_at(prices, trace)
    due = [_dues_s(r, limits.deadline_rule) for r in trace.requests]
    first_due_s, last_due_s = np.array(due, dtype=np.float64).T
    release_s = trace.arrivals_s
    possible = np.maximum(first_work_s, shortest_s) <= first_due_s - release_s
    work_s = np.maximum(first_work_s + rest_work_s, shortest_s * outputs)
    possible &= work_s <= last_due_s - release_s
    if kv_tokens is not None:
        possible &= prompts + outputs - 1 <= kv_tokens
    if limits.deadline_rule is not DeadlineRule.ENVELOPE:
        tpot_s = np.array([r.slo.tpot_s for r in trace.requests])
        possible &= (outputs == 1) | (shortest_s <= tpot_s + TOLERANCE_S)
    gaps = max(1, len(trace) - 1)
    return Demand(
        num_offered=len(trace),
        window_s=trace.duration_s * len(trace) / gaps,
        release_s=release_s[possible],
        first_due_s=first_due_s[possible],
        last_due_s=last_due_s[possible],
        first_work_s=first_work_s[possible],
        rest_work_s=rest_work_s[possible],
        index=np.flatnonzero(possible),
    )


def work_at(prices: StepPrices, trace: Trace) -> tuple[FloatArray, FloatArray]:
    """Return the device time of each prompt and of all later tokens, without the price of steps."""
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    prompt_s, decode_s = _work_tables(prices, longest_context(trace))
    return prompt_s[prompts], decode_s[prompts + outputs - 1] - decode_s[prompts]


def shortest_step_s(model: StepTimes) -> float:
    """Return the least time of a step that emits a token: short decode, short chunk, or both."""
    seconds = []
    for chunks in ([(1, 0)], [(2, 0)], [(1, 0), (2, 0)]):
        shape = BatchShape()
        for new, prior in chunks:
            shape.add(new, prior)
        seconds.append(model.predict(shape))
    return min(seconds)


def _work_tables(prices: StepPrices, longest: int) -> tuple[FloatArray, FloatArray]:
    """Return the least seconds of the first k tokens, and of emitting after each of them."""
    k = np.arange(longest + 1, dtype=np.float64)
    # A chunk of one prompt token counts as a decode, which never costs less than a prefill token.
    prompt_s = prices.per_prefill_token_s * k + prices.per_pair_s * k * (k + 1) / 2
    emit_s = np.minimum(prices.per_decode_s + prices.per_context_s * k, prompt_s)
    return prompt_s, np.cumsum(emit_s)


def _dues_s(request: TraceRequest, rule: DeadlineRule) -> tuple[float, float]:
    """Return when the first and the last token of a good request are due at the latest.

    Under all rules the last one is due at a + ttft + (n - 1) * tpot.  `tbt`, however, excuses a
    share of the gaps altogether, so that nothing but an end-to-end SLO limits the last token.
    """
    slo, gaps = request.slo, request.num_output_tokens - 1
    first_s = request.arrival_s + slo.ttft_s + TOLERANCE_S
    last_s = first_s + gaps * (slo.tpot_s + TOLERANCE_S) if gaps else first_s
    if rule is DeadlineRule.TBT and math.floor(MAX_LATE_GAP_SHARE * gaps):
        last_s = math.inf
    if slo.e2e_s is not None:
        last_s = min(last_s, request.arrival_s + slo.e2e_s + TOLERANCE_S)
    # Sums of many steps are rounded, so the due times get an extra microsecond.
    return min(first_s, last_s) + 1e-6, last_s + 1e-6
