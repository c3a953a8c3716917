"""vLLM V0: decodes that wait for whole prompts, and chunked prefill, which avoids this."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pandas as pd
from matplotlib.figure import Figure

from experiments.engines.study import (
    CODE,
    CONV,
    GAP_SHARES,
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
_MAX_MODEL_LEN = 16384
_DEFAULT, _CHUNKED = "whole prompts first", "chunked prefill"
_MODES = {
    _DEFAULT: ("vllm_v0", _MAX_MODEL_LEN),
    _CHUNKED: ("vllm_v0:enable_chunked_prefill=True", 512),
}
_LOADS = {"Azure conversations": (CONV, (6.0, 12.0)), "Azure code": (CODE, (1.5, 3.0))}


def _cases(scale: Scale) -> Iterator[Case]:
    model, num_blocks = device(_MODEL)
    for trace_name, (source, rates) in _LOADS.items():
        for rate, (mode, (policy, budget)) in product(rates, _MODES.items()):
            config = SimulationConfig(Limits(max_num_batched_tokens=budget), num_blocks)
            for window, trace in windows(source, scale.window_requests, scale.num_windows, rate):
                at = {"trace": trace_name, "rate": rate, "mode": mode, "window": window}
                yield Case(at, trace, model, policy, config)


def _findings(frame: pd.DataFrame) -> Iterator[Finding]:
    for (trace, rate), here in frame.groupby(["trace", "rate"], sort=False):
        default, chunked = {"mode": _DEFAULT}, {"mode": _CHUNKED}
        tail, longest, first, half = (
            ratio(here, column, default, chunked)
            for column in (gap_column(0.99), gap_column(1.0), "ttft_mean_s", gap_column(0.5))
        )
        worst_s = here[here["mode"] == _DEFAULT][gap_column(1.0)].max()
        yield Finding(
            f"{trace} at {rate:g}/s: with whole prompts first the 99th percentile of the gaps "
            f"between tokens is {tail} times that of chunked prefill, the longest gap {longest} "
            f"times (up to {worst_s:.2f} s), the median gap {half} times; the mean TTFT is "
            f"{first} times.",
            tail.is_above_one and longest.is_above_one,
        )


def _figure(frame: pd.DataFrame) -> Figure:
    """Draw quantiles of the gaps, a panel for each trace and rate."""
    panels = list(frame.groupby(["trace", "rate"], sort=False))
    figure = Figure(figsize=(WIDTH_IN * 1.25, 3.4), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, ((trace, rate), here) in zip(grid, panels, strict=True):
        tidy(axes)
        for i, mode in enumerate(_MODES):
            middle, low, high = [], [], []
            for share in GAP_SHARES:
                found = over_windows(here, ["mode"], gap_column(share)).set_index("mode").loc[mode]
                middle.append(1000 * found["median"])
                low.append(1000 * found["min"])
                high.append(1000 * found["max"])
            places = range(len(GAP_SHARES))
            style = look(i)
            axes.plot(places, middle, label=mode, **style.line())
            axes.fill_between(places, low, high, color=style.colour, alpha=0.15, linewidth=0)
        log_axis(axes, "y")
        axes.set_title(f"{trace}, {rate:g}/s", fontsize=10)
        axes.set_xticks(places, ["50 %", "90 %", "99 %", "99.9 %", "99.99 %", "all"], rotation=40)
    grid[0].set_ylabel("gap between tokens, ms")
    figure.supxlabel("share of the gaps that are no longer", fontsize=10)
    legend_above(figure)
    return figure


STALLS = Study(
    name="stalls",
    title="vLLM V0 stalls its decodes for prompts",
    statement=(
        "V0 runs waiting prompts before decodes and never mixes the two, so that every decode "
        "stands still while whole prompts are computed. With chunked prefill a gap is at most a "
        "step of 512 tokens."
    ),
    source=(
        "Sarathi-Serve (OSDI '24), which calls them generation stalls; the order is that of vLLM "
        "0.6.3's `_schedule_default` and `_schedule_chunked_prefill`."
    ),
    setup=(
        f"{_MODEL}, `vllm_v0` with the defaults of 0.6.3 at `max_model_len` {_MAX_MODEL_LEN}: "
        f"{_MAX_MODEL_LEN} tokens in a step, 512 if chunked."
    ),
    cases=_cases,
    findings=_findings,
    figure=_figure,
)
