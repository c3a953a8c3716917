"""SGLang: what the radix cache saves, and what asking for the longest prefix first adds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pandas as pd
from matplotlib.figure import Figure

from experiments.engines.study import (
    BLOCK_SIZE,
    MOONCAKE,
    Case,
    Finding,
    Scale,
    Study,
    device,
    over_windows,
    ratio,
    windows,
)
from slosched.core import Limits
from slosched.engine.simulate import SimulationConfig
from slosched.evaluate.plots.style import WIDTH_IN, legend_above, look, tidy
from slosched.kv import PrefixCaching

_MODEL = "h200/llama-3.1-8b"
_RATE = 2.5
_LONGER, _FEWER = 5, 2
"""Conversations have to come back: windows of so many times the requests, and fewer of them."""
_CHUNK, _MAX_PREFILL = 8192, 16384
_LARGE = 8


@dataclass(frozen=True)
class _Way:
    cache: PrefixCaching
    order: str


_OFF, _FCFS, _LPM = "no cache", "radix, fcfs", "radix, lpm"
_WAYS = {
    _OFF: _Way(PrefixCaching.OFF, "fcfs"),
    _FCFS: _Way(PrefixCaching.RADIX, "fcfs"),
    _LPM: _Way(PrefixCaching.RADIX, "lpm"),
}
_SHOWN = {
    "cached": "share of prompt tokens found",
    "ttft_mean_s": "mean TTFT, s",
    "tokens_per_s": "output tokens/s",
}


def _cases(scale: Scale) -> Iterator[Case]:
    model, own_blocks = device(_MODEL)
    for factor, (name, way) in product((1, _LARGE), _WAYS.items()):
        config = SimulationConfig(
            Limits(max_num_batched_tokens=_MAX_PREFILL),
            factor * own_blocks,
            prefix_cache=way.cache,
        )
        size, number = _LONGER * scale.window_requests, max(2, scale.num_windows // _FEWER)
        for window, trace in windows(MOONCAKE, size, number, _RATE):
            cache = f"{factor * own_blocks * BLOCK_SIZE / 1e6:.2g} M tokens"
            at = {"cache": cache, "way": name, "window": window}
            yield Case(at, trace, model, f"sglang:schedule_policy={way.order}", config)


def _findings(frame: pd.DataFrame) -> Iterator[Finding]:
    for cache, here in frame.groupby("cache", sort=False):
        found = over_windows(here, ["way"], "cached").set_index("way")["median"]
        sooner = ratio(here, "ttft_mean_s", {"way": _OFF}, {"way": _FCFS})
        more = ratio(here, "tokens_per_s", {"way": _FCFS}, {"way": _OFF})
        yield Finding(
            f"A cache of {cache}: {found[_FCFS]:.1%} of the prompt tokens are found in the order "
            f"of arrival; without a cache the mean TTFT is {sooner} times as long, and with it "
            f"{more} times as many tokens come out a second.",
            sooner.is_above_one,
        )
        hits = ratio(here, "cached", {"way": _LPM}, {"way": _FCFS})
        earlier = ratio(here, "ttft_mean_s", {"way": _FCFS}, {"way": _LPM})
        yield Finding(
            f"A cache of {cache}: longest prefix first finds {found[_LPM]:.1%}, {hits} times what "
            f"the order of arrival finds, and the mean TTFT in the order of arrival is {earlier} "
            f"times that of longest prefix first. At most {here['max_waiting'].max():.0f} waited; "
            "SGLang goes back to fcfs where more than 128 do.",
            hits.is_above_one and earlier.is_above_one,
        )


def _figure(frame: pd.DataFrame) -> Figure:
    """Bars with the range over windows: a panel a measure, a group a cache."""
    figure = Figure(figsize=(WIDTH_IN, 3.0), layout="constrained")
    caches = list(dict.fromkeys(frame["cache"]))
    for axes, (column, label) in zip(figure.subplots(1, len(_SHOWN)), _SHOWN.items(), strict=True):
        tidy(axes)
        for i, name in enumerate(_WAYS):
            found = over_windows(frame[frame["way"] == name], ["cache"], column)
            reach = [found["median"] - found["min"], found["max"] - found["median"]]
            places = [k + 0.26 * (i - 1) for k in range(len(caches))]
            axes.bar(
                places,
                found["median"],
                0.24,
                yerr=reach,
                label=name,
                color=look(i).colour,
                hatch=("", "//", "xx")[i],
                edgecolor="white",
                error_kw={"elinewidth": 1, "capsize": 2},
            )
        axes.set_xticks(range(len(caches)), caches, fontsize=9)
        axes.set_title(label, fontsize=10)
    legend_above(figure)
    return figure


PREFIXES = Study(
    name="prefixes",
    title="SGLang's prefix cache, and the order that asks for it",
    statement=(
        "Requests that share prefixes are served sooner with the radix tree than without; trying "
        "those first of which most is cached (`lpm`) finds more than the order of arrival and "
        "shortens the mean TTFT further."
    ),
    source="SGLang (NeurIPS '24), RadixAttention and cache-aware scheduling.",
    setup=(
        f"Mooncake's conversations with their prefix hashes at {_RATE:g}/s; {_MODEL} with the KV "
        f"cache that it has, and with one {_LARGE} times as large; `sglang` with "
        f"`chunked_prefill_size` {_CHUNK} and the other defaults."
    ),
    cases=_cases,
    findings=_findings,
    figure=_figure,
)
