"""vLLM V1: the token budget of a step trades TTFT against gaps between tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pandas as pd
from matplotlib.figure import Figure

from experiments.engines.study import (
    CODE,
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
_BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
_LOADS = {"Azure conversations": (CONV, 12.0), "Azure code": (CODE, 3.0)}
_SHOWN = {
    "ttft_mean_s": "TTFT, mean",
    "ttft_p99_s": "TTFT, 99th percentile",
    gap_column(0.99): "gap between tokens, 99th percentile",
}


def _cases(scale: Scale) -> Iterator[Case]:
    model, num_blocks = device(_MODEL)
    for (name, (source, rate)), budget in product(_LOADS.items(), _BUDGETS):
        config = SimulationConfig(Limits(max_num_batched_tokens=budget), num_blocks)
        for window, trace in windows(source, scale.window_requests, scale.num_windows, rate):
            at = {"trace": name, "rate": rate, "budget": budget, "window": window}
            yield Case(at, trace, model, "vllm_v1", config)


def _findings(frame: pd.DataFrame) -> Iterator[Finding]:
    for (trace, rate), here in frame.groupby(["trace", "rate"], sort=False):
        small, large = {"budget": _BUDGETS[0]}, {"budget": _BUDGETS[-1]}
        gaps = ratio(here, gap_column(0.99), large, small)
        first = ratio(here, "ttft_mean_s", small, large)
        medians = over_windows(here, ["budget"], gap_column(0.99))["median"]
        yield Finding(
            f"{trace} at {rate:g}/s: from {_BUDGETS[0]} to {_BUDGETS[-1]} tokens the 99th "
            f"percentile of the gaps grows {gaps}-fold"
            f"{', with every doubling' if medians.is_monotonic_increasing else ''}; the mean "
            f"TTFT is {first} times as long with {_BUDGETS[0]} as with {_BUDGETS[-1]}.",
            gaps.is_above_one and first.is_above_one,
        )


def _figure(frame: pd.DataFrame) -> Figure:
    """Draw latencies over the budget, a panel for each trace."""
    figure = Figure(figsize=(WIDTH_IN, 3.4), layout="constrained")
    panels = list(frame.groupby(["trace", "rate"], sort=False))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, ((trace, rate), here) in zip(grid, panels, strict=True):
        tidy(axes)
        for i, (column, label) in enumerate(_SHOWN.items()):
            found = over_windows(here, ["budget"], column)
            style = look(i)
            axes.plot(found["budget"], 1000 * found["median"], label=label, **style.line())
            low, high = 1000 * found["min"], 1000 * found["max"]
            axes.fill_between(
                found["budget"], low, high, color=style.colour, alpha=0.15, linewidth=0
            )
        axes.set_xscale("log")
        axes.set_xticks(_BUDGETS, [str(budget) for budget in _BUDGETS], minor=False)
        axes.minorticks_off()
        log_axis(axes, "y")
        axes.set_title(f"{trace}, {rate:g}/s", fontsize=10)
        axes.set_xlabel("max_num_batched_tokens")
    grid[0].set_ylabel("ms")
    legend_above(figure)
    return figure


BUDGETS = Study(
    name="budgets",
    title="The token budget trades TTFT against ITL",
    statement=(
        "With chunked prefill a small budget of tokens a step keeps the gaps between tokens short "
        "and makes prompts wait. A large budget shortens TTFT and lengthens the gaps."
    ),
    source=(
        "Sarathi-Serve (OSDI '24), which tunes its budget for this trade; vLLM's optimization "
        "guide says the same of `max_num_batched_tokens`."
    ),
    setup=f"{_MODEL}, `vllm_v1` with its defaults except for the budget.",
    cases=_cases,
    findings=_findings,
    figure=_figure,
)
