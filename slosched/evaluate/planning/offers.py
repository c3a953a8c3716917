"""Kinds of replicas with their prices, and the share of requests that a kind can serve at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import NamedTuple

from slosched.core import BatchShape, DeadlineRule
from slosched.fleet.steady import MeanRequest, sustained_rate
from slosched.fleet.view import ReplicaKind
from slosched.kv import PrefixCaching
from slosched.workload import Trace, TraceRequest

_GUESSED_LOAD = 0.8
"""The share of its sustained rate to which a replica is loaded in the first fleet that is tried."""


@dataclass(frozen=True)
class Offer:
    """A kind of replica, and what its GPUs cost."""

    name: str
    """The GPU, as the user calls it."""
    model_name: str
    kind: ReplicaKind
    gpu_price: float
    """The price of one GPU for an hour."""

    @property
    def price(self) -> float:
        """Return the price of one replica for an hour."""
        return self.kind.num_gpus * self.gpu_price

    def guess(self, trace: Trace, rate: float) -> int:
        """Return about how many replicas serve the trace at `rate` requests/s in time."""
        promised = [r.slo.tpot_s for r in trace.requests if r.slo.tpot_s < math.inf]
        mean = MeanRequest(
            float(trace.prompt_tokens.mean()),
            float(trace.output_tokens.mean()),
            sum(promised) / len(promised) if promised else math.inf,
        )
        return max(1, math.ceil(rate / (_GUESSED_LOAD * sustained_rate(self.kind, mean))))


def priced(text: str) -> tuple[str, float]:
    """Return the name and the price of "h100=2.5"; raise ValueError for any other text."""
    name, equals, number = text.rpartition("=")
    try:
        price = float(number)
    except ValueError:
        price = math.nan
    if not (equals and name and 0 < price < math.inf):
        raise ValueError(
            f"--gpu {text!r} is not NAME=PRICE with a positive price of a GPU for an hour, as in "
            "h100=2.5"
        )
    return name, price


class Reach(NamedTuple):
    """The share of requests that can be in time on any number of replicas, and what keeps others.

    A request is never served faster than alone on a replica.
    """

    share: float
    too_late: float
    """Share of the requests whose prefill alone takes longer than their TTFT."""
    too_slow: float
    """Share of those whose decode alone takes longer than their TPOT."""
    too_long: float
    """Share of those that do not fit into the KV cache."""
    prefill_s: float
    """The time of the median prompt's prefill, with what the server adds."""
    decode_s: float
    """The time of a decode after the median prompt."""

    def why(self, name: str) -> str:
        """Return in a sentence why no number of replicas of this name serves more."""
        reasons = [
            (self.too_late, f"prefill takes {_ms(self.prefill_s)} for the median prompt", "TTFT"),
            (self.too_slow, f"decode takes {_ms(self.decode_s)} after the median prompt", "TPOT"),
        ]
        said = [
            f"{share:.1%} miss their {promise}, as a {what}"
            for share, what, promise in reasons
            if share > 0
        ]
        said += [f"{self.too_long:.1%} do not fit into the KV cache"] * (self.too_long > 0)
        return (
            f"{name}: no number of replicas has more than {self.share:.1%} of the requests in "
            f"time.  Even alone on one, {' and '.join(said) or 'none is late'}"
        )


def reach_of(kind: ReplicaKind, traces: Sequence[Trace]) -> Reach:
    """Return the share of all requests that this kind of replica can serve in time.

    Steps take what the latency model says, without scatter.  With a prefix cache a prefill may be
    shorter, and with draft tokens a decode may be, so then neither is taken to be too long.  Under
    the rule `envelope` decodes may use up the time by which the first token comes early.
    """
    config, model = kind.config, kind.model
    banks_slack = config.limits.deadline_rule is DeadlineRule.ENVELOPE
    may_hit = config.prefix_cache is not PrefixCaching.OFF

    @cache
    def prefill_s(num_tokens: int) -> float:
        return model.predict_prefill(num_tokens) + config.per_request_s

    @cache
    def decode_s(num_tokens: int) -> float:
        shape = BatchShape()
        shape.add(1, num_tokens)
        return model.predict(shape)

    def kept_by(request: TraceRequest) -> tuple[bool, bool, bool]:
        prompt, num_decodes, slo = (
            request.num_prompt_tokens,
            request.num_output_tokens - 1,
            request.slo,
        )
        early_s = slo.ttft_s - (0.0 if may_hit else prefill_s(prompt))
        has_decodes = num_decodes > 0 and config.drafts is None
        banked_s = max(0.0, early_s) / num_decodes if has_decodes and banks_slack else 0.0
        return (
            early_s >= 0,
            not has_decodes or decode_s(prompt) <= slo.tpot_s + banked_s,
            prompt + request.num_output_tokens <= config.kv_tokens,
        )

    requests = [request for trace in traces for request in trace.requests]
    kept = [kept_by(request) for request in requests]
    middle = int(median(request.num_prompt_tokens for request in requests))
    too_late, too_slow, too_long = (sum(not each[i] for each in kept) / len(kept) for i in range(3))
    share = sum(map(all, kept)) / len(kept)
    return Reach(share, too_late, too_slow, too_long, prefill_s(middle), decode_s(middle))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
