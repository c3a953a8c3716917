"""vLLM's proposed `slo` policy: TTFT targets for short and for long prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.claims.panels import panels
from experiments.engines.study import Case, Finding, Scale, Study, device, ratio
from slosched.core import Limits, Request
from slosched.metrics import StepRow
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import synthesize

_MODEL = "h100/llama-3.1-8b"
_SEED = 8_000
_RATES = (8, 24)
_SHORT_TOKENS = 2048
_WAYS = {
    "order of arrival": "vllm_v1",
    "slo, bias 0": "vllm_slo",
    "slo, bias 1": "vllm_slo:priority_bias=1",
    "slo, bias 10": "vllm_slo:priority_bias=10",
    "shortest first": "vllm_residual_sjf:max_wait_s=100000",
}
_FCFS, _BIAS_0, _BIAS_1, _BIAS_10, _SJF = ({"way": way} for way in _WAYS)


def _cases(scale: Scale) -> Iterator[Case]:
    model, num_blocks = device(_MODEL)
    config = SimulationConfig(Limits(max_num_batched_tokens=8192), num_blocks)
    for rate, window in product(_RATES, range(scale.num_windows)):
        trace = synthesize(
            "azure_code", num_requests=scale.window_requests, rate=rate, seed=_SEED + window
        )
        for way, policy in _WAYS.items():
            yield Case({"rate": rate, "way": way, "window": window}, trace, model, policy, config)


def _by_length(requests: Sequence[Request], _: Sequence[StepRow]) -> Mapping[str, float]:
    ttft_s = np.array([r.token_times_s[0] - r.arrival_s for r in requests])
    is_short = np.array([r.num_prompt_tokens <= _SHORT_TOKENS for r in requests])
    return {
        "short_share": float(is_short.mean()),
        "ttft_short_s": float(ttft_s[is_short].mean()),
        "ttft_long_s": float(ttft_s[~is_short].mean()),
        "ttft_long_max_s": float(ttft_s[~is_short].max()),
    }


def _findings(frame: pd.DataFrame) -> Iterator[Finding]:
    for rate, here in frame.groupby("rate", sort=False):
        mean_s = here[here["way"] == _FCFS["way"]]["ttft_mean_s"].mean()
        where = f"{rate}/s ({mean_s:.3g} s mean TTFT in the order of arrival)"
        for bias, way in ((1, _BIAS_1), (10, _BIAS_10)):
            short, long = (ratio(here, c, way, _FCFS) for c in ("ttft_short_s", "ttft_long_s"))
            yield Finding(
                f"{where}: with `priority_bias={bias}` the mean TTFT of prompts of at most "
                f"{_SHORT_TOKENS:,} tokens is {short} times that in the order of arrival, and that "
                f"of longer ones {long} times.",
                short.is_below_one,
            )
        most = ratio(here, "ttft_long_max_s", _BIAS_10, _SJF)
        yield Finding(
            f"{rate}/s: the longest TTFT of a long prompt with bias 10 is {most} times that with "
            "the shortest first.",
            most.is_below_one,
        )


def _why(frame: pd.DataFrame) -> str:
    unbiased = ratio(frame, "ttft_short_s", _BIAS_0, _FCFS)
    return (
        "**What it rests on:** waiting prompts are compared by the shares of their targets that "
        "are over, so a long prompt is overtaken by short ones that have waited at least half as "
        "long (bias 1) or a third as long (bias 10). Where nobody waits, nothing changes. With the "
        "default, bias 0, both targets are 20 s, and a bonus for short prompts alone makes their "
        f"mean TTFT {unbiased} times that in the order of arrival. The policy does not know what a "
        "request was promised, nor whether it can still be in time."
    )


def _figure(frame: pd.DataFrame) -> Figure:
    measures = {
        "ttft_short_s": "mean TTFT of short prompts, s",
        "ttft_long_s": "mean TTFT of long prompts, s",
    }
    return panels(frame, "rate", "requests/s", "way", measures)


TARGETS = Study(
    name="targets",
    title="Two TTFT targets by prompt length",
    statement=(
        "With a positive bias, short prompts are less likely to get stuck behind long prefills, "
        "while long prompts still age into service instead of starving."
    ),
    source=(
        "[vLLM PR #53571](https://github.com/vllm-project/vllm/pull/53571); "
        "[vllm_slo](policies/vllm_slo.md)"
    ),
    setup=(
        f"{_MODEL} with steps of 8,192 tokens; requests made up with the statistics of Azure's "
        "code trace, below what the device can serve and far above it. `vllm_residual_sjf` without "
        "a bound and without a prefix cache is the shortest prompt first."
    ),
    cases=_cases,
    findings=_findings,
    figure=_figure,
    why=_why,
    more=_by_length,
)
