"""Planning a step ahead, which gains more throughput the shorter the device's steps are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.engines.study import (
    CONV,
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
from slosched.evaluate.plots.style import BLACK, legend_above, look, single_axes
from slosched.simulator.simulate import SimulationConfig

_DEVICES = (
    "l40s/llama-3.1-8b",
    "h100/llama-3.1-70b-tp4",
    "a100/llama-3.1-8b",
    "rtx4090/llama-3.2-3b",
    "h100/llama-3.1-8b",
    "b200/llama-3.1-8b",
)
_SCHEDULE_S = (0.001, 0.003)
_SEATS = 32
_SOON = 1000.0
"""A rate in requests/s at which all requests are soon waiting, so that the device limits them."""
_EXPECTED = 0.05
"""The allowed error of the formula for the gain, which ignores the first and last steps."""


def _cases(scale: Scale) -> Iterator[Case]:
    for name, schedule_s, overlap in product(_DEVICES, _SCHEDULE_S, (False, True)):
        model, num_blocks = device(name)
        config = SimulationConfig(
            Limits(max_num_batched_tokens=8192, max_num_seqs=_SEATS),
            num_blocks,
            schedule_s=schedule_s,
            overlap=overlap,
        )
        size = max(1, scale.window_requests // 2)
        for window, trace in windows(CONV, size, scale.num_windows, _SOON):
            at = {"device": name, "schedule_ms": 1000 * schedule_s, "overlap": overlap}
            yield Case({**at, "window": window}, trace, model, "vllm_v1", config)


def _gains(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each device and decision time: its gain in tokens/s and mean step time."""
    rows = []
    for (name, schedule_ms), here in frame.groupby(["device", "schedule_ms"], sort=False):
        gain = ratio(here, "tokens_per_s", {"overlap": True}, {"overlap": False})
        step_ms = 1000 * over_windows(here[here["overlap"]], ["device"], "mean_step_s")["median"]
        rows.append(
            {"device": name, "schedule_ms": schedule_ms, "step_ms": step_ms[0], **gain._asdict()}
        )
    return pd.DataFrame(rows)


def _findings(frame: pd.DataFrame) -> Iterator[Finding]:
    gains = _gains(frame)
    for schedule_ms in sorted(set(gains["schedule_ms"])):
        by_step = gains[gains["schedule_ms"] == schedule_ms].sort_values("step_ms", ascending=False)
        slow, fast = by_step.iloc[0], by_step.iloc[-1]
        expected = 1 + schedule_ms / by_step["step_ms"]
        off = float((by_step["mean"] / expected - 1).abs().max())
        yield Finding(
            f"Decisions of {schedule_ms:g} ms: {100 * (slow['mean'] - 1):.1f} % more tokens/s on "
            f"{slow['device']}, whose steps take {slow['step_ms']:.1f} ms, and "
            f"{100 * (fast['mean'] - 1):.1f} % on {fast['device']} at {fast['step_ms']:.1f} ms; "
            f"nowhere is it further than {off:.1%} from (step + decision) / step.",
            bool(by_step["mean"].is_monotonic_increasing and off < _EXPECTED),
        )


def _figure(frame: pd.DataFrame) -> Figure:
    """Draw the gain over the length of a step, with the line that it should follow."""
    gains = _gains(frame)
    figure, axes = single_axes(3.6)
    steps_ms = np.linspace(0.8 * gains["step_ms"].min(), 1.05 * gains["step_ms"].max(), 200)
    for i, schedule_ms in enumerate(sorted(set(gains["schedule_ms"]))):
        ordered = gains[gains["schedule_ms"] == schedule_ms].sort_values("step_ms")
        percent = 100 * (ordered[["mean", "low", "high"]] - 1)
        reach = [percent["mean"] - percent["low"], percent["high"] - percent["mean"]]
        style = look(i).line(linestyle="none")
        label = f"{schedule_ms:g} ms a decision"
        axes.errorbar(ordered["step_ms"], percent["mean"], reach, label=label, capsize=2, **style)
        axes.plot(
            steps_ms,
            100 * schedule_ms / steps_ms,
            color=BLACK,
            linewidth=0.9,
            linestyle="--",
            label="decision / step",
        )
    most = gains[gains["schedule_ms"] == gains["schedule_ms"].max()]
    for name, step_ms, gain in zip(most["device"], most["step_ms"], most["mean"], strict=True):
        place, style = (step_ms, 100 * (gain - 1)), {"fontsize": 8, "rotation": 25}
        axes.annotate(name, place, xytext=(4, 6), textcoords="offset points", **style)
    axes.set(xlabel="mean step of the device, ms", ylabel="more tokens/s, %", ylim=(0, None))
    legend_above(figure)
    return figure


OVERLAPPING = Study(
    name="overlapping",
    title="Overlapped scheduling gains as steps become short",
    statement=(
        "If the next step is planned while one runs, the time of a decision is hidden. Throughput "
        "then grows by decision time over step time, so that the fastest devices gain most."
    ),
    source=(
        "vLLM V1's asynchronous scheduling and SGLang's overlap loop, both the default by now. "
        "The effect on attainment is in [experiments/overlap](../experiments/overlap/results.md)."
    ),
    setup=(
        f"Azure's conversations, all waiting from the start, {_SEATS} seats; `vllm_v1` with its "
        "defaults on the bundled devices."
    ),
    cases=_cases,
    findings=_findings,
    figure=_figure,
)
