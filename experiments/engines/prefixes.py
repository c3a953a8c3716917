"""SGLang: the gain of the radix cache, and that of serving the longest cached prefix first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
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
from slosched.evaluate.plots.style import WIDTH_IN, legend_above, look, tidy
from slosched.kv import PrefixCaching
from slosched.policy.engines.sglang.policy import MAX_WAITING_FOR_PREFIXES
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace
from slosched.workload.statistics import prefix_hit_rate

_MODEL = "h200/llama-3.1-8b"
_LONGER, _FEWER = 5, 2
"""Factors for the windows, which are longer and fewer here, so that conversations come back."""
_CHUNK, _MAX_PREFILL = 8192, 16384
_LARGE = 8


@dataclass(frozen=True)
class _Way:
    cache: PrefixCaching
    policy: str


_OFF, _FCFS, _LPM, _ALWAYS = "no cache", "radix, fcfs", "radix, lpm", "radix, lpm always"
_WAYS = {
    _OFF: _Way(PrefixCaching.OFF, "sglang"),
    _FCFS: _Way(PrefixCaching.RADIX, "sglang"),
    _LPM: _Way(PrefixCaching.RADIX, "sglang:schedule_policy=lpm"),
    _ALWAYS: _Way(
        PrefixCaching.RADIX, "sglang:schedule_policy=lpm,max_waiting_for_prefixes=1000000"
    ),
}
_HEAVY = 2.5
_LOADS = (
    *product((1,), (_HEAVY,), (_OFF, _FCFS, _LPM)),
    *product((_LARGE,), (_HEAVY,), (_OFF, _FCFS, _LPM, _ALWAYS)),
    *product((_LARGE,), (1.75,), (_FCFS, _LPM)),
)
"""Loads to play: the cache as a multiple of the device's own, requests/s, and the way.

At the lower rate few requests wait."""
_SHOWN = {
    "cached": "share of prompt tokens found",
    "ttft_mean_s": "mean TTFT, s",
    "tokens_per_s": "output tokens/s",
}


def _cases(scale: Scale) -> Iterator[Case]:
    model, own_blocks = device(_MODEL)
    for factor, rate, name in _LOADS:
        config = SimulationConfig(
            Limits(max_num_batched_tokens=_MAX_PREFILL),
            factor * own_blocks,
            prefix_cache=_WAYS[name].cache,
        )
        size, number = _LONGER * scale.window_requests, max(2, scale.num_windows // _FEWER)
        for window, trace in windows(MOONCAKE, size, number, rate):
            cache = f"{factor * own_blocks * BLOCK_SIZE / 1e6:.2g} M tokens"
            at = {"cache": cache, "rate": rate, "way": name, "window": window}
            yield Case(at | reuse(trace), trace, model, _WAYS[name].policy, config)


def reuse(trace: Trace) -> dict[str, float]:
    """Return what an endless cache would find in the prompts, and how long it would have kept it.

    `findable` is the share of prompt tokens that an earlier prompt began with.  `since_s` is the
    median time since the last such prompt, over the blocks found.
    """
    last_s: dict[int, float] = {}
    num_found, waited_s = [], []
    for request in trace.requests:
        prefix, seen_s, num_seen = 0, 0.0, 0
        for block in request.prefix_hashes:
            prefix = hash((prefix, block))
            if prefix in last_s:
                seen_s, num_seen = last_s[prefix], num_seen + 1
            last_s[prefix] = request.arrival_s
        num_found.append(num_seen)
        waited_s.append(request.arrival_s - seen_s)
    order = np.argsort(waited_s)
    below = np.cumsum(np.array(num_found)[order])
    middle = int(np.searchsorted(below, below[-1] / 2))
    return {
        "findable": prefix_hit_rate(r.prefix_hashes for r in trace.requests),
        "since_s": float(np.array(waited_s)[order][middle]),
    }


def _findings(frame: pd.DataFrame) -> Iterator[Finding]:
    for (cache, rate), here in frame.groupby(["cache", "rate"], sort=False):
        found = over_windows(here, ["way"], "cached").set_index("way")["median"]
        if _OFF in found:
            sooner = ratio(here, "ttft_mean_s", {"way": _OFF}, {"way": _FCFS})
            more = ratio(here, "tokens_per_s", {"way": _FCFS}, {"way": _OFF})
            yield Finding(
                f"A cache of {cache} at {rate:g}/s: {found[_FCFS]:.1%} of the prompt tokens are "
                f"found in the order of arrival; without a cache the mean TTFT is {sooner} times "
                f"as long, and with it {more} times as many tokens come out a second.",
                sooner.is_above_one,
            )
        hits = ratio(here, "cached", {"way": _LPM}, {"way": _FCFS})
        earlier = ratio(here, "ttft_mean_s", {"way": _FCFS}, {"way": _LPM})
        most = here[here["way"] == _LPM]["max_waiting"].max()
        yield Finding(
            f"A cache of {cache} at {rate:g}/s: longest prefix first finds {found[_LPM]:.1%}, "
            f"{hits} times what the order of arrival finds, and the mean TTFT in the order of "
            f"arrival is {earlier} times that of longest prefix first. At most {most:.0f} waited.",
            hits.is_above_one and earlier.is_above_one,
        )


def _why(frame: pd.DataFrame) -> str:
    """Explain what is left to be found in the cache, and the cost of SGLang's switch to fcfs."""
    parts = []
    for (cache, rate), here in frame.groupby(["cache", "rate"], sort=False):
        found = over_windows(here, ["way"], "cached").set_index("way")["median"]
        if _ALWAYS not in found:
            continue
        given_up = ratio(here, "ttft_mean_s", {"way": _LPM}, {"way": _ALWAYS})
        gained = ratio(here, "ttft_mean_s", {"way": _FCFS}, {"way": _ALWAYS})
        parts.append(
            f"If it is used at any length of the queue, with a cache of {cache} at {rate:g}/s, "
            f"longest prefix first finds {found[_ALWAYS]:.1%}. The mean TTFT in the order of "
            f"arrival is {gained} times as long, and with SGLang's switch {given_up} times."
        )
    since_s = frame[frame["rate"] == _HEAVY]["since_s"].median()
    return (
        "**Why the order adds little here:** SGLang switches to fcfs when more than "
        f"{MAX_WAITING_FOR_PREFIXES} requests wait. {' '.join(parts)} And there is little to find: "
        "an endless cache, in the order of arrival, would find "
        f"{frame['findable'].median():.1%} of these prompts, half of "
        f"it {since_s:.0f} s or more after another prompt began with it (at {_HEAVY:g}/s). An "
        "order can bring only those requests together that wait at the same time."
    )


def _figure(frame: pd.DataFrame) -> Figure:
    """Draw bars with the range over windows: a panel for each measure, a group for each cache."""
    frame = frame[frame["rate"] == _HEAVY]
    figure = Figure(figsize=(WIDTH_IN, 3.0), layout="constrained")
    caches = list(dict.fromkeys(frame["cache"]))
    for axes, (column, label) in zip(figure.subplots(1, len(_SHOWN)), _SHOWN.items(), strict=True):
        tidy(axes)
        for i, name in enumerate(_WAYS):
            found = over_windows(frame[frame["way"] == name], ["cache"], column)
            reach = [found["median"] - found["min"], found["max"] - found["median"]]
            places = [caches.index(cache) + 0.21 * (i - 1.5) for cache in found["cache"]]
            axes.bar(
                places,
                found["median"],
                0.19,
                yerr=reach,
                label=name,
                color=look(i).colour,
                hatch=("", "//", "xx", "..")[i],
                edgecolor="white",
                error_kw={"elinewidth": 1, "capsize": 2},
            )
        axes.set_xticks(range(len(caches)), caches, fontsize=9)
        axes.set_title(label, fontsize=10)
    legend_above(figure)
    return figure


PREFIXES = Study(
    name="prefixes",
    title="SGLang's prefix cache, and serving the longest prefix first",
    statement=(
        "Requests that share prefixes are served sooner with the radix tree than without it. "
        "Trying those first whose cached prefix is longest (`lpm`) finds more than the order of "
        "arrival and shortens the mean TTFT further."
    ),
    source="SGLang (NeurIPS '24), RadixAttention and cache-aware scheduling.",
    setup=(
        f"Mooncake's conversations with their prefix hashes at {_HEAVY:g}/s, which is more than "
        f"can be served, and at a rate at which few wait; {_MODEL} with its own KV cache, and "
        f"with one {_LARGE} times as large; `sglang` with `chunked_prefill_size` {_CHUNK} and its "
        f"other defaults. The figure is for {_HEAVY:g}/s."
    ),
    cases=_cases,
    findings=_findings,
    figure=_figure,
    why=_why,
)
