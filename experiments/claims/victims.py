"""Whom to preempt: vLLM's youngest, the least computed, or the largest cost-aware score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.claims.panels import panels
from experiments.engines.study import (
    BLOCK_SIZE,
    Case,
    Finding,
    Scale,
    Study,
    device,
    ratio,
)
from slosched.core import Limits, Request
from slosched.metrics import StepRow
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace
from slosched.workload.request import TraceRequest

_MODEL = "h100/llama-3.1-8b"
_SEED = 5_000
_TOKENS, _SPREAD = 512, 0.5
_RATE = 12.0
_MIXED, _FIXED = "mixed prompts", "prompts of 512"
_AT_ONCE, _ONLINE = "at once, mixed prompts", "online, mixed prompts"
_LENGTH_FIXED = "online, prompts of 512"
_LOADS = {_AT_ONCE: (None, _MIXED), _ONLINE: (_RATE, _MIXED), _LENGTH_FIXED: (_RATE, _FIXED)}
_SIZES = (
    (_AT_ONCE, "wasted_tokens", 0.6, "the waste"),
    (_ONLINE, "wasted_tokens", 0.76, "the waste"),
    (_LENGTH_FIXED, "ttft_mean_s", 0.76, "the mean TTFT"),
)
"""What is claimed of the ratio to vLLM's rule, where it is claimed least."""
_KV_TOKENS = (49_152, 32_768, 16_384)
_V1, _LCF, _COST = ({"policy": name} for name in ("vllm_v1", "vllm_lcf", "vllm_cost_aware"))
_POLICIES = tuple(at["policy"] for at in (_V1, _LCF, _COST))


def _trace(size: int, rate: float | None, prompts: str, seed: int) -> Trace:
    """Return requests like those of `vllm bench serve --dataset-name random`."""
    rng = np.random.default_rng(_SEED + seed)
    low, high = int(_TOKENS * (1 - _SPREAD)), int(_TOKENS * (1 + _SPREAD))
    lengths = rng.integers(low, high + 1, (size, 2))
    gaps_s = rng.exponential(1 / rate, size) if rate else np.zeros(size)
    requests = [
        TraceRequest(
            f"r{i}", float(at_s), int(prompt) if prompts == _MIXED else _TOKENS, int(output)
        )
        for i, (at_s, (prompt, output)) in enumerate(zip(np.cumsum(gaps_s), lengths, strict=True))
    ]
    return Trace.of(requests, "random")


def _cases(scale: Scale) -> Iterator[Case]:
    model, _ = device(_MODEL)
    for (load, (rate, prompts)), kv_tokens in product(_LOADS.items(), _KV_TOKENS):
        config = SimulationConfig(Limits(), kv_tokens // BLOCK_SIZE)
        for window in range(scale.num_windows):
            trace = _trace(scale.window_requests, rate, prompts, window)
            for policy in _POLICIES:
                at = {"load": load, "kv_tokens": kv_tokens, "policy": policy, "window": window}
                yield Case(at, trace, model, policy, config)


def _waste(requests: Sequence[Request], steps: Sequence[StepRow]) -> Mapping[str, float]:
    """Return what preemptions cost: tokens that were computed again, and latencies to the end."""
    computed = sum(step.num_prefill_tokens + step.num_decodes for step in steps)
    # The last token of an answer is never computed.
    needed = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in requests)
    ends_s = np.array([r.token_times_s[-1] - r.arrival_s for r in requests])
    num_preemptions = sum(r.num_preemptions for r in requests)
    return {
        "wasted_tokens": computed - needed,
        "wasted_share": (computed - needed) / computed,
        "wasted_each": (computed - needed) / max(num_preemptions, 1),
        "e2e_mean_s": float(ends_s.mean()),
        "e2e_p99_s": float(np.quantile(ends_s, 0.99)),
    }


def _lcf_findings(frame: pd.DataFrame) -> Iterator[Finding]:
    for (load, kv_tokens), here in frame.groupby(["load", "kv_tokens"], sort=False):
        share = here[here["policy"] == _V1["policy"]]["wasted_share"].mean()
        waste, each, speed, ttft = (
            ratio(here, column, _LCF, _V1)
            for column in ("wasted_tokens", "wasted_each", "tokens_per_s", "ttft_mean_s")
        )
        yield Finding(
            f"{load}, {kv_tokens:,} KV tokens ({share:.0%} of all tokens are wasted by `vllm_v1`): "
            f"`vllm_lcf` wastes {waste} times as many tokens, and {each} times as many for each "
            f"preemption. Its output tokens a second are {speed} and its mean TTFT {ttft} times "
            "those of `vllm_v1`.",
            not waste.is_below_one if load == _LENGTH_FIXED else waste.is_below_one,
        )
    for load, column, claimed, what in _SIZES:
        least = min(
            ratio(here, column, _LCF, _V1).low
            for _, here in frame[frame["load"] == load].groupby("kv_tokens")
        )
        yield Finding(
            f"{load}: claimed is that {what} falls by {1 - claimed:.0%} or more. The lowest end of "
            f"the intervals is a fall by {max(1 - least, 0):.0%}.",
            least <= claimed,
        )


def _lcf_why(_: pd.DataFrame) -> str:
    return (
        "**What it rests on:** each preemption costs less, but there are more of them, "
        "since who is preempted has computed nothing and is the next victim. Most of what is saved "
        "with each goes into the others. The author's lengths and loads are not public in full, "
        "and another mixture of lengths may save more."
    )


def _cost_findings(frame: pd.DataFrame) -> Iterator[Finding]:
    for (load, kv_tokens), here in frame.groupby(["load", "kv_tokens"], sort=False):
        waste, each, speed, end = (
            ratio(here, column, _COST, _V1)
            for column in ("wasted_tokens", "wasted_each", "tokens_per_s", "e2e_p99_s")
        )
        to_lcf = ratio(here, "wasted_tokens", _COST, _LCF)
        yield Finding(
            f"{load}, {kv_tokens:,} KV tokens: `vllm_cost_aware` wastes {waste} times as many "
            f"tokens as `vllm_v1`, {each} times as many for each preemption, and {to_lcf} times as "
            f"many as `vllm_lcf`. Its output tokens a second are {speed} and its P99 to the last "
            f"token {end} times those of `vllm_v1`.",
            waste.is_below_one,
        )


def _cost_why(_: pd.DataFrame) -> str:
    return (
        "A finding agrees if the waste falls surely. **What it rests on:** blocks over "
        "tokens is nearly the same for all, about 1/16, and larger for short requests, whose last "
        "block is half empty. So the score does not prefer victims that release more blocks, and "
        "the tokens to compute again hardly count. What is left is the progress towards "
        "`max_tokens`, which is the same for all clients here, as in most benchmarks."
    )


def _figure(frame: pd.DataFrame) -> Figure:
    online = frame[frame["load"] == _ONLINE]
    measures = {"wasted_share": "share of tokens computed again", "e2e_p99_s": "P99 to the end, s"}
    return panels(online, "kv_tokens", "KV cache, tokens (online, mixed)", "policy", measures)


_SETUP = (
    f"{_MODEL} with KV caches far smaller than its own, so that requests are preempted. Prompts "
    "and answers of 256 to 768 tokens, evenly spread, or prompts of 512; all at once or at "
    f"{_RATE:g}/s (Poisson). `max_tokens` is the longest answer of the part."
)

LCF = Study(
    name="victims",
    title="Preempt who has computed least",
    statement=(
        "With least computed first, 24 to 30 % fewer tokens are wasted online with mixed lengths "
        "(40 to 59 % when all wait from the start), with throughput and latency unchanged. With "
        "prompts of one length the waste is unchanged, but the mean TTFT falls by 24 %."
    ),
    source=(
        "[vLLM RFC #54644](https://github.com/vllm-project/vllm/issues/54644), "
        "[PR #53723](https://github.com/vllm-project/vllm/pull/53723); "
        "[vllm_lcf](policies/vllm_lcf.md)"
    ),
    setup=_SETUP,
    cases=_cases,
    findings=_lcf_findings,
    figure=_figure,
    why=_lcf_why,
    more=_waste,
)

COST_AWARE = replace(
    LCF,
    title="Preempt by blocks, cost and progress",
    statement=(
        "The score prefers victims that release more blocks, have less to compute again, and are "
        "not close to their end, and so improves on the choice by place in the queue. The text "
        "that could be read has no figures."
    ),
    source=(
        "[vLLM PR #56897](https://github.com/vllm-project/vllm/pull/56897); "
        "[vllm_cost_aware](policies/vllm_cost_aware.md)"
    ),
    findings=_cost_findings,
    why=_cost_why,
)
"""The same replays, read for the other claim."""
