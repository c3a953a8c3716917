"""What a cell may draw: requests, and promises that devices of any speed can mostly keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.arena.scenarios import (
    TRACES,
    MadeUp,
    Recorded,
    Source,
)
from slosched.core import SLO, BatchShape
from slosched.evaluate.judge.promises import PREFILL_FACTOR, PROMISES
from slosched.perfmodel import FittedModel
from slosched.workload import Proportional, SLORule, Trace, TraceRequest, synthesize
from slosched.workload.lengths import Lognormal

_RECORDED = {
    "azure_conv": "azure_conv_2023.csv",
    "azure_code": "azure_code_2023.csv",
    "mooncake_conv": "mooncake_conversation.jsonl",
    "servegen_r1": "servegen_deepseek_r1_1h_5rps.csv",
    "sharegpt": "sharegpt_8k_lengths.csv",
}
"""The file of each kind of request that `synthesize` can imitate where the file is absent."""
_BURSTS = MadeUp(Lognormal(2000, 1.5), Lognormal(200, 1.0), cv=3.0)
KINDS = (*_RECORDED, "sessions", "bursts")
WITH_PREFIXES = ("mooncake_conv", "sessions")
"""Kinds whose prompts repeat one another, so that a prefix cache matters."""
SIZE_FACTORS = {"mooncake_conv": 0.25, "servegen_r1": 0.5}
"""Requests of a window as a multiple of the usual number, for kinds whose replays take long."""

TAIL_SHARE, TAIL_FACTOR, TAIL_TOKENS = 0.05, 8, 4096
"""In a heavy tail this share of outputs is so many times as long, up to so many tokens."""
UNKEEPABLE_TPOT_S = 0.001
"""A TPOT that no bundled device can keep."""


@dataclass(frozen=True)
class Imitated:
    """Random requests with the statistics of a kind; numbers are seeds."""

    kind: str

    def windows(self, size: int, seeds: Sequence[int]) -> list[Trace]:
        return [synthesize(self.kind, num_requests=size, seed=seed) for seed in seeds]

    def __str__(self) -> str:
        return f"{self.kind}, synthesised"


def source_of(kind: str) -> Source:
    """Return the recorded trace of a kind if its file is there, else requests like it."""
    if kind == "bursts":
        return _BURSTS
    file = _RECORDED.get(kind)
    if file is not None and (TRACES / file).exists():
        return Recorded(file)
    return Imitated(kind)


def mean_tokens(kind: str) -> float:
    """Return the mean tokens of a request, the same whether recorded traces are there or not."""
    source: Source = _BURSTS if kind == "bursts" else Imitated(kind)
    (sample,) = source.windows(1000, [0])
    return float((sample.prompt_tokens + sample.output_tokens).mean())


def with_heavy_tail(trace: Trace, seed: int) -> Trace:
    """Return the requests with a share of the outputs much longer."""
    longer = np.random.default_rng(seed).random(len(trace)) < TAIL_SHARE
    requests = tuple(
        replace(r, num_output_tokens=_lengthened(r.num_output_tokens)) if much else r
        for r, much in zip(trace.requests, longer, strict=True)
    )
    return replace(trace, requests=requests)


def _lengthened(tokens: int) -> int:
    return max(tokens, min(TAIL_FACTOR * tokens, TAIL_TOKENS))


@dataclass(frozen=True)
class Varied:
    """A rule in which each request has a TTFT and a TPOT of its own, from tight to loose."""

    device: FittedModel
    seed: int

    def assign(self, num_prompt_tokens: Sequence[int]) -> list[SLO]:
        rng, size = np.random.default_rng(self.seed), len(num_prompt_tokens)
        bases_s = 0.3 * (10 / 0.3) ** rng.random(size)
        tpots_s = _step_s(self.device) * 1.25 * 8 ** rng.random(size)
        return [
            SLO(float(base_s) + PREFILL_FACTOR * self.device.predict_prefill(n), float(tpot_s))
            for n, base_s, tpot_s in zip(num_prompt_tokens, bases_s, tpots_s, strict=True)
        ]


def _at_least(base_s: float, tpot_s: float, steps: float) -> Callable[[FittedModel, int], SLORule]:
    """Return a promise whose TPOT is at least a number of the device's own steps."""

    def rule(device: FittedModel, _seed: int) -> SLORule:
        longest_s = max(tpot_s, steps * _step_s(device))
        return Proportional(device.predict_prefill, PREFILL_FACTOR, longest_s, base_s)

    return rule


def _step_s(device: FittedModel) -> float:
    """Return the time of a step of 16 decodes with 1,000 tokens of context each."""
    shape = BatchShape()
    shape.add_decodes([1000] * 16)
    return device.predict(shape)


PROMISE_RULES: dict[str, Callable[[FittedModel, int], SLORule]] = {
    "tight": _at_least(0.5, 0.025, 1.5),
    "medium": _at_least(1.0, 0.050, 2.0),
    "loose": _at_least(5.0, 0.100, 4.0),
    "mixed": PROMISES["mixed"],
    "varied": Varied,
}
PROMISED = {
    "tight": "0.5 s + 2 × prefill; 25 ms a token, at least 1.5 steps of 16 decodes",
    "medium": "1 s + 2 × prefill; 50 ms a token, at least 2 such steps",
    "loose": "5 s + 2 × prefill; 100 ms a token, at least 4 such steps",
    "mixed": "one of the arena's three tiers each, 25, 50 or 100 ms a token on any device",
    "varied": "each its own: 0.3 to 10 s + 2 × prefill; 1.25 to 10 such steps a token",
}


def one_after_another(windows: Sequence[Trace]) -> Trace:
    """Return the requests of windows that follow one another, each at a rate of 1 request/s.

    Requests of different windows share no prefix, as those of windows that are played alone.
    """
    requests, begin_s = [], 0.0
    for place, window in enumerate(windows):
        even = window.scaled_to(1.0)
        requests += [_moved(r, begin_s, place, len(windows)) for r in even.requests]
        begin_s += len(window)
    return replace(windows[0], requests=tuple(requests))


def _moved(request: TraceRequest, begin_s: float, place: int, num_places: int) -> TraceRequest:
    session = request.session_id
    return replace(
        request,
        request_id=f"{place}-{request.request_id}",
        arrival_s=begin_s + request.arrival_s,
        prefix_hashes=tuple(h * num_places + place for h in request.prefix_hashes),
        session_id=None if session is None else f"{place}-{session}",
    )


def with_unkeepable(trace: Trace, one_in: int) -> Trace:
    """Return the requests with every so-manieth promised a TPOT that no device can keep."""
    requests = tuple(
        replace(r, slo=SLO(r.slo.ttft_s, UNKEEPABLE_TPOT_S)) if i % one_in == 0 else r
        for i, r in enumerate(trace.requests)
    )
    return replace(trace, requests=requests)
