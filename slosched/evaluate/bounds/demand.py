"""What each request of a trace asks of the device, at the very least, and by when."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from slosched.core import BatchShape, DeadlineRule, Limits
from slosched.evaluate.bounds.prices import FloatArray, StepPrices, StepTimes, legal_steps
from slosched.metrics import MAX_LATE_GAP_SHARE, TOLERANCE_S
from slosched.workload.trace import Trace, TraceRequest

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Demand:
    """The requests that could be good at all; arrays have shape (number of them,)."""

    num_offered: int
    window_s: float
    """Over which the load was offered (`metrics.offered_window_s`)."""
    release_s: FloatArray
    first_due_s: FloatArray
    last_due_s: FloatArray
    """When the last token of a good request is out; inf if nothing says so."""
    first_work_s: FloatArray
    """Device time for the prompt, due with the first token."""
    rest_work_s: FloatArray
    """Device time for all later tokens, due with the last one."""
    index: IntArray
    """Which request of the trace each of them is."""
    prices: StepPrices

    def at_speed(self, factor: float) -> Demand:
        """The same requests arriving `factor` times as fast, as by `Trace.scaled_to`."""
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
    """Work at the model's step prices, deadlines of the metric of `limits.deadline_rule`.

    Every prompt token is computed in some step before the first token is out.  Every later token
    takes one decode, or all tokens before it anew if the request was preempted, whichever is
    cheaper.  Left out are requests that even an idle device cannot serve well: which do not fit
    into a KV cache of `kv_tokens` (None: it has no end), whose TTFT is below the work of their
    prompt or the shortest step, or, where no slack is banked, whose TPOT is below the shortest
    step.

    Assumes steps that take what `model` says (no noise, no drift), one replica that runs one step
    at a time, and no prefix cache.
    """
    longest = longest_context(trace)
    prices = legal_steps(model, limits, longest, kv_tokens).dearest(token_weights(trace))
    return demand_at(prices, shortest_step_s(model), trace, limits, kv_tokens)


def longest_context(trace: Trace) -> int:
    """Tokens of the longest context that a step computes on: the last token is never computed."""
    return int((trace.prompt_tokens + trace.output_tokens).max()) - 1


def token_weights(trace: Trace) -> FloatArray:
    """How much the trace needs of what `StepPrices` prices: t, Bd, t2, t3, and no steps."""
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    pairs = prompts * (prompts + 1) / 2
    contexts = (outputs - 1) * (prompts + outputs / 2)
    needs = [prompts.sum(), (outputs - 1).sum(), pairs.sum(), contexts.sum(), 0]
    return np.array(needs, dtype=np.float64)


def demand_at(
    prices: StepPrices, shortest_s: float, trace: Trace, limits: Limits, kv_tokens: int | None
) -> Demand:
    """As `demand_of`, at prices and a shortest step that are known to hold."""
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
        prices=prices,
    )


def work_at(prices: StepPrices, trace: Trace) -> tuple[FloatArray, FloatArray]:
    """Device time for each prompt, and for all later tokens; the price of steps is not in it."""
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    prompt_s, decode_s = _work_tables(prices, longest_context(trace))
    return prompt_s[prompts], decode_s[prompts + outputs - 1] - decode_s[prompts]


def shortest_step_s(model: StepTimes) -> float:
    """The least time of a step that emits a token: one short decode, a short chunk, or both."""
    seconds = []
    for chunks in ([(1, 0)], [(2, 0)], [(1, 0), (2, 0)]):
        shape = BatchShape()
        for new, prior in chunks:
            shape.add(new, prior)
        seconds.append(model.predict(shape))
    return min(seconds)


def _work_tables(prices: StepPrices, longest: int) -> tuple[FloatArray, FloatArray]:
    """Least seconds of the first k tokens, and of emitting after each of the first k."""
    k = np.arange(longest + 1, dtype=np.float64)
    # A prompt token that is alone in its chunk is a decode, which costs no less.
    prompt_s = prices.per_prefill_token_s * k + prices.per_pair_s * k * (k + 1) / 2
    emit_s = np.minimum(prices.per_decode_s + prices.per_context_s * k, prompt_s)
    return prompt_s, np.cumsum(emit_s)


def _dues_s(request: TraceRequest, rule: DeadlineRule) -> tuple[float, float]:
    """When the first and the last token of a good request are out at the latest.

    Under all rules the last is due at a + ttft + (n - 1) * tpot, but `tbt` excuses a share of the
    gaps altogether.
    """
    slo, gaps = request.slo, request.num_output_tokens - 1
    first_s = request.arrival_s + slo.ttft_s + TOLERANCE_S
    last_s = first_s + gaps * (slo.tpot_s + TOLERANCE_S) if gaps else first_s
    if rule is DeadlineRule.TBT and math.floor(MAX_LATE_GAP_SHARE * gaps):
        last_s = math.inf
    if slo.e2e_s is not None:
        last_s = min(last_s, request.arrival_s + slo.e2e_s + TOLERANCE_S)
    # Sums of many steps are rounded; a bound may be a microsecond too generous.
    return min(first_s, last_s) + 1e-6, last_s + 1e-6
