"""The rate that one replica sustains, by its latency model: a fluid of equal requests."""

from __future__ import annotations

import math
from typing import NamedTuple

from slosched.core import BatchShape
from slosched.fleet.view import ReplicaKind


class MeanRequest(NamedTuple):
    """The mean lengths of a traffic's requests, and the TPOT that they are promised."""

    prompt_tokens: float
    output_tokens: float
    tpot_s: float = math.inf


def sustained_rate(kind: ReplicaKind, mean: MeanRequest) -> float:
    """Return the highest rate, in requests/s, that steps of constant size serve within the TPOT.

    In a steady state in which B requests decode, B / `output_tokens` requests end in each step, so
    as many arrive, and the step prefills their prompts.  The rate is what ends in a step over its
    predicted time, at the largest B at which the step takes at most `tpot_s` and fits into the
    seats, the tokens of a step and the KV cache.  If that is not even so for one request, the rate
    is that of B = 1.  Nobody waits in this fluid; a real fleet needs room for bursts besides.
    Source: ours; O(log seats) predictions.
    """
    low, high = 1, kind.config.limits.max_num_seqs + 1
    while high - low > 1:
        middle = (low + high) // 2
        if _is_steady(kind, mean, middle):
            low = middle
        else:
            high = middle
    return low / (mean.output_tokens * kind.model.predict(_step(mean, low)))


def _is_steady(kind: ReplicaKind, mean: MeanRequest, num_decodes: int) -> bool:
    """Tell whether a step with this many decodes keeps the TPOT and all limits."""
    step = _step(mean, num_decodes)
    held_tokens = num_decodes * (mean.prompt_tokens + mean.output_tokens / 2)
    return (
        step.num_tokens <= kind.config.limits.max_num_batched_tokens
        and held_tokens <= kind.config.kv_tokens
        and kind.model.predict(step) <= mean.tpot_s
    )


def _step(mean: MeanRequest, num_decodes: int) -> BatchShape:
    """Return a step of decodes in mid-answer and the prompts that take the places of the ended."""
    step = BatchShape()
    context = round(mean.prompt_tokens + mean.output_tokens / 2)
    step.add_decodes([max(1, context)] * num_decodes)
    if num_new := math.ceil(num_decodes * mean.prompt_tokens / mean.output_tokens):
        # A token more would count as a decode if it were alone.
        step.add(max(2, num_new), max(0, round(mean.prompt_tokens) - num_new) // 2)
    return step
