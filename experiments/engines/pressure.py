"""TensorRT-LLM: no eviction guaranteed, against the fullest use of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pandas as pd
from matplotlib.figure import Figure

from experiments.engines.study import (
    BLOCK_SIZE,
    CONV,
    Case,
    Finding,
    Scale,
    Study,
    device,
    gap_column,
    over_windows,
    ratio,
    windows,
)
from slosched.core import Limits
from slosched.evaluate.plots.style import WIDTH_IN, legend_above, log_axis, look, tidy
from slosched.simulator.simulate import SimulationConfig

_MODEL = "h100/llama-3.1-8b"
_RATE = 20.0
_MAX_NUM_TOKENS = 8192
_SHORT = (16_384, 32_768, 65_536)
_KV_TOKENS = (*_SHORT, 262_144)
_POLICIES = ("guaranteed_no_evict", "max_utilization")
_NO_EVICT, _MAX = ({"policy": policy} for policy in _POLICIES)
_SHOWN = {
    "mean_running": "requests that run at once",
    "tokens_per_s": "output tokens/s",
    "ttft_mean_s": "mean TTFT, s",
    gap_column(1.0): "longest gap between tokens, s",
}


def _cases(scale: Scale) -> Iterator[Case]:
    model, _ = device(_MODEL)
    for kv_tokens, policy in product(_KV_TOKENS, _POLICIES):
        limits = Limits(max_num_batched_tokens=_MAX_NUM_TOKENS)
        config = SimulationConfig(limits, kv_tokens // BLOCK_SIZE)
        for window, trace in windows(CONV, scale.window_requests, scale.num_windows, _RATE):
            short = trace.clipped(_MAX_NUM_TOKENS).trace
            at = {"kv_tokens": kv_tokens, "policy": policy, "window": window}
            spec = f"trtllm:capacity_scheduler_policy={policy}"
            yield Case(at, short, model, spec, config)


def _findings(frame: pd.DataFrame) -> Iterator[Finding]:
    for kv_tokens, here in frame.groupby("kv_tokens", sort=False):
        more, sooner, longest = (
            ratio(here, "tokens_per_s", _MAX, _NO_EVICT),
            ratio(here, "ttft_mean_s", _NO_EVICT, _MAX),
            ratio(here, gap_column(1.0), _MAX, _NO_EVICT),
        )
        paused = here[here["policy"] == _MAX["policy"]]["num_preemptions"]
        kept = here[here["policy"] == _NO_EVICT["policy"]]["num_preemptions"]
        yield Finding(
            f"{kv_tokens:,} KV tokens: max utilization puts out {more} times as many tokens a "
            f"second. The mean TTFT with no evict is {sooner} times as long. The longest gap with "
            f"max utilization is {longest} times that with no evict. Pauses in the median window: "
            f"{paused.median():.0f} with max utilization, {kept.median():.0f} with no evict.",
            kept.max() == 0 and (more.is_above_one if kv_tokens in _SHORT else more.is_one),
        )


def _figure(frame: pd.DataFrame) -> Figure:
    """Draw the measures over the size of the cache, a panel for each."""
    figure = Figure(figsize=(WIDTH_IN, 5.2), layout="constrained")
    for axes, (column, label) in zip(figure.subplots(2, 2).flat, _SHOWN.items(), strict=True):
        tidy(axes)
        for i, policy in enumerate(_POLICIES):
            found = over_windows(frame[frame["policy"] == policy], ["kv_tokens"], column)
            style = look(i)
            name = policy.replace("_", " ")
            axes.plot(found["kv_tokens"], found["median"], label=name, **style.line())
            axes.fill_between(
                found["kv_tokens"],
                found["min"],
                found["max"],
                color=style.colour,
                alpha=0.15,
                linewidth=0,
            )
        log_axis(axes, "x")
        axes.set_xticks(_KV_TOKENS, [f"{tokens // 1024} k" for tokens in _KV_TOKENS])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_title(label, fontsize=10)
        axes.set_xlabel("KV cache, tokens")
    legend_above(figure)
    return figure


PRESSURE = Study(
    name="pressure",
    title="TensorRT-LLM: no evict against max utilization",
    statement=(
        "GUARANTEED_NO_EVICT reserves for each request all tokens that it may emit, so that no "
        "request is ever paused. MAX_UTILIZATION starts every request that fits for the next "
        "step. While the KV cache is short, this gives more throughput at the price of paused "
        "requests; otherwise the two are the same."
    ),
    source="TensorRT-LLM's documentation of `CapacitySchedulerPolicy`.",
    setup=(
        f"Azure's conversations at {_RATE:g}/s, prompts cut to {_MAX_NUM_TOKENS}; {_MODEL} with "
        "KV caches smaller than its own; `trtllm` with its defaults. Clients ask for as many "
        "tokens as the longest answer of the window has."
    ),
    cases=_cases,
    findings=_findings,
    figure=_figure,
)
