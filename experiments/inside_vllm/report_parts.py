"""What the two parts of the page have in common: the figure, headings, and how vLLM was tuned."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure

from experiments.inside_vllm.compare import mean_of
from experiments.inside_vllm.setups import Setup
from slosched.evaluate.plots.style import WIDTH_IN, legend_above, look, tidy


def goodput_figure(setups: Iterable[str], runs: pd.DataFrame, predictions: pd.DataFrame) -> Figure:
    """Draw a panel for each setup: good requests/s measured (lines) and simulated (rings)."""
    names = [name for name in setups if (runs["setup"] == name).any()]
    figure = Figure(figsize=(WIDTH_IN * 1.25, 3.4), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        tidy(axes)
        here = runs[runs["setup"] == name]
        for i, system in enumerate(systems_of(here)):
            rows = here[here["system"] == system]
            rates = sorted(rows["rate"].unique())
            means = [mean_of(values_at(rows, rate)) for rate in rates]
            label = "vLLM's own, tuned" if system.startswith("vLLM ") else system
            style = look(i)
            axes.errorbar(
                rates,
                [mean.value for mean in means],
                np.nan_to_num([mean.reach for mean in means]),
                label=label,
                capsize=2,
                **style.line(linewidth=1.2),
            )
            said = predictions[(predictions["setup"] == name) & (predictions["system"] == system)]
            said = said[said["rate"].isin(rates)]
            if len(said):
                guess = said.groupby("rate")["good_requests_per_s"].mean()
                axes.plot(guess.index, guess, "o", mfc="none", ms=10, color=style.colour)
        top = max(here["rate"])
        axes.plot([0, top], [0, top], ":", color="0.6", linewidth=0.8)
        axes.set(
            title=name, xlabel="requests/s offered", xlim=(0, top * 1.05), ylim=(0, top * 1.05)
        )
        axes.set_ylabel("good requests/s")
    legend_above(figure)
    return figure


def heading(setup: Setup, runs: pd.DataFrame) -> str:
    """Return the heading of a setup, and what is played with which SLOs."""
    return (
        f"### {setup.title}\n\n{runs['window'].nunique()} parts of {runs['num_offered'].max()} "
        f"requests; TTFT {setup.base_s:g} s and twice the prompt's unloaded prefill, TPOT "
        f"{1000 * setup.tpot_s:g} ms."
    )


def tuned(tuning: pd.DataFrame, setup: Setup) -> str:
    """Return how much vLLM's own scheduler served in time with each budget."""
    if tuning.empty:
        return "vLLM's budget was not tuned by measurement here."
    means = tuning.groupby("max_num_batched_tokens")["attainment"].mean()
    said = ", ".join(f"{budget}: {share:.1%}" for budget, share in means.items())
    counted = sorted(tuning["rate"].unique())
    rates = ", ".join(f"{rate:g}" for rate in counted)
    num_parts = tuning["window"].nunique()
    where = (
        f"{num_parts} parts of the trace that are"
        if num_parts > 1
        else "a part of the trace that is"
    )
    others = "" if {*setup.rates} <= {*counted} else "; other heats were too disturbed to count"
    return (
        f"The share in time with vLLM's own scheduler, on {where} not measured "
        f"below, by `--max-num-batched-tokens` (at {rates}/s{others}): {said}."
    )


def systems_of(runs: pd.DataFrame) -> list[str]:
    """Return the names of the systems, vLLM's own scheduler first."""
    return sorted(runs["system"].unique(), key=lambda name: (not name.startswith("vLLM "), name))


def values_at(rows: pd.DataFrame, rate: float) -> npt.NDArray[np.float64]:
    """Return the good requests/s of each run at this rate."""
    return rows[rows["rate"] == rate]["good_requests_per_s"].to_numpy(float)
