"""Residual SJF: the least left to compute after the prefix cache, with a bound on waiting."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pandas as pd
from matplotlib.figure import Figure

from experiments.claims.panels import panels
from experiments.engines.study import Case, Finding, Scale, Study, device, ratio
from slosched.core import Limits
from slosched.kv import PrefixCaching
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import synthesize
from slosched.workload.lengths import Lognormal
from slosched.workload.sessions import Sessions

_MODEL = "h100/llama-3.1-8b"
_SEED = 7_000
_RATES = (3, 4)
_SESSIONS = Sessions(
    mean_turns=12.0,
    think_s=5.0,
    question=Lognormal(2000, 1.5),
    answer=Lognormal(100, 1.0),
    system_tokens=2048,
    num_system_prompts=4,
    max_prompt_tokens=60_000,
)
_WAYS = {
    "order of arrival": "vllm_v1",
    "residual": "vllm_residual_sjf",
    "whole prompt": "vllm_residual_sjf:cache_aware=false",
    "residual, 1 s": "vllm_residual_sjf:max_wait_s=1",
    "residual, 100 s": "vllm_residual_sjf:max_wait_s=100",
}
_FCFS, _RESIDUAL, _WHOLE, _SOON, _LATE = ({"way": way} for way in _WAYS)


def _cases(scale: Scale) -> Iterator[Case]:
    model, num_blocks = device(_MODEL)
    limits = Limits(max_num_batched_tokens=8192)
    config = SimulationConfig(limits, num_blocks, prefix_cache=PrefixCaching.HASH)
    for rate, window in product(_RATES, range(scale.num_windows)):
        trace = synthesize(
            "sessions",
            num_requests=scale.window_requests,
            rate=rate,
            seed=_SEED + window,
            sessions=_SESSIONS,
        )
        for way, policy in _WAYS.items():
            yield Case({"rate": rate, "way": way, "window": window}, trace, model, policy, config)


def _findings(frame: pd.DataFrame) -> Iterator[Finding]:
    for rate, here in frame.groupby("rate", sort=False):
        arrival = here[here["way"] == _FCFS["way"]]
        where = (
            f"{rate}/s ({arrival['ttft_mean_s'].mean():.3g} s mean TTFT in the order of arrival)"
        )
        mean, tail = (ratio(here, c, _RESIDUAL, _FCFS) for c in ("ttft_mean_s", "ttft_p99_s"))
        yield Finding(
            f"{where}: with `vllm_residual_sjf` the mean TTFT is {mean} times, its P99 {tail} "
            "times that in the order of arrival.",
            mean.is_below_one,
        )
        mean = ratio(here, "ttft_mean_s", _RESIDUAL, _WHOLE)
        yield Finding(
            f"{rate}/s: by the residual the mean TTFT is {mean} times that by the whole prompt.",
            mean.is_below_one,
        )
        mean, tail = (ratio(here, c, _LATE, _SOON) for c in ("ttft_mean_s", "ttft_p99_s"))
        yield Finding(
            f"{rate}/s: with a bound of 100 s the mean TTFT is {mean} times, its P99 {tail} times "
            "that with a bound of 1 s.",
            mean.is_below_one and tail.is_above_one,
        )


def _why(frame: pd.DataFrame) -> str:
    busy = frame[frame["rate"] == _RATES[-1]]
    cached = {
        way: busy[busy["way"] == at["way"]]["cached"].mean()
        for way, at in (("arrival", _FCFS), ("bound", _RESIDUAL), ("long", _LATE))
    }
    return (
        "**What it rests on:** the prompts are turns of conversations, and each turn begins with "
        "the ones before it. Whoever waits long finds that his prefix was evicted, so an order "
        f"that serves cached prompts at once computes less: at {_RATES[-1]}/s, "
        f"{cached['arrival']:.0%} of the prompt tokens are found in the order of arrival, "
        f"{cached['bound']:.0%} with the default bound of 10 s, and {cached['long']:.0%} with 100 "
        "s. As soon as all requests wait longer than the bound, the order is that of arrival "
        "again. Without a prefix cache, or with one that forgets nothing, there is no such gain."
    )


def _figure(frame: pd.DataFrame) -> Figure:
    measures = {"ttft_mean_s": "mean TTFT, s", "ttft_p99_s": "P99 of TTFT, s"}
    return panels(frame, "rate", "requests/s", "way", measures)


RESIDUAL = Study(
    name="residual",
    title="Start what the prefix cache leaves short",
    statement=(
        "An order by residual prefill cost instead of raw prompt length does not take a cached "
        "long prompt for an expensive one. A small bound on waiting is close to the order of "
        "arrival, with a flat tail; a large one improves the mean TTFT at the cost of P95 and P99."
    ),
    source=(
        "[vLLM PR #51375](https://github.com/vllm-project/vllm/pull/51375) and the guide that "
        "comes with it; [vllm_residual_sjf](policies/vllm_residual_sjf.md)"
    ),
    setup=(
        f"{_MODEL} with `--prefix-cache hash` and steps of 8,192 tokens. Made-up conversations: 12 "
        "turns in the mean, questions of 2,000 tokens, answers of 100, 4 system prompts of 2,048 "
        "tokens, 5 s between turns."
    ),
    cases=_cases,
    findings=_findings,
    figure=_figure,
    why=_why,
)
