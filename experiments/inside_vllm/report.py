"""The page docs/inside_vllm.md; all its numbers and verdicts are made from the results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure

from experiments.arena.figures import save
from experiments.inside_vllm.compare import gains, mean_of, prediction_errors, same_ranking
from experiments.inside_vllm.results import PREDICTIONS, TUNING, Book
from experiments.inside_vllm.setups import SETUPS, Setup
from slosched.evaluate.plots.style import WIDTH_IN, legend_above, look, tidy
from slosched.perfmodel import ServerTime

PAGE = Path(__file__).parents[2] / "docs" / "inside_vllm.md"
_POINTS = 5.0
"""The error in points within which a prediction counts as right."""


def write(page: Path = PAGE, book: Book | None = None) -> None:
    """Write the page, and its figure into a folder with the same name."""
    book = book or Book()
    runs = book.shown()
    runs = runs[
        [rate in SETUPS[name].rates for name, rate in zip(runs["setup"], runs["rate"], strict=True)]
    ]
    if runs.empty:
        raise ValueError("nothing is measured: `python -m experiments.inside_vllm run` does it")
    predictions = book.read(PREDICTIONS)
    save(goodput_figure(runs, predictions), page.with_suffix("") / "goodput.svg")
    page.write_text(text(runs, predictions, book.valid(TUNING)))


def text(runs: pd.DataFrame, predictions: pd.DataFrame, tuning: pd.DataFrame) -> str:
    """Return the page in Markdown."""
    names = [name for name in SETUPS if (runs["setup"] == name).any()]
    parts = [_HEAD, _FIGURE]
    for name in names:
        chosen = [frame[frame["setup"] == name] for frame in (runs, predictions, tuning)]
        parts += [_section(SETUPS[name], *chosen)]
    parts += [_predictions(runs, predictions), _foot(runs)]
    return "\n\n".join(part for part in parts if part) + "\n"


_HEAD = (
    "# Inside vLLM: measured\n\n"
    "<!-- Made by `python -m experiments.inside_vllm report`; edit report.py there instead. -->\n\n"
    "Real vLLM 0.32.0 is measured: its API server, engine core, scheduler and KV cache manager. It "
    "runs with its own scheduler at the `--max-num-batched-tokens` that the tables name, and with "
    "slosched's policies in front of it. All servers are up at the same time and get the same "
    "requests, together on an emulated device, in turns on a real one. A server that has to wait "
    "for a core looks worse than it is (the last columns). Good requests are those served within "
    "their SLOs (TTFT, and TPOT as `vllm bench serve --goodput` defines it); rejected ones are not "
    "good. Intervals are 95 %, by Student's t over the parts of the trace. How it is done: "
    "[experiments/inside_vllm](../experiments/inside_vllm/README.md)."
)

_FIGURE = (
    "![Good requests/s against requests/s offered](inside_vllm/goodput.svg)\n\n"
    "Lines are measured, with their intervals; rings are simulated; the dotted line is the load "
    "that was offered."
)


def goodput_figure(runs: pd.DataFrame, predictions: pd.DataFrame) -> Figure:
    """Draw a panel for each setup: good requests/s measured (lines) and simulated (rings)."""
    names = [name for name in SETUPS if (runs["setup"] == name).any()]
    figure = Figure(figsize=(WIDTH_IN * 1.25, 3.4), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        tidy(axes)
        here = runs[runs["setup"] == name]
        for i, system in enumerate(_systems(here)):
            rows = here[here["system"] == system]
            rates = sorted(rows["rate"].unique())
            means = [mean_of(_values(rows, rate)) for rate in rates]
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


def _section(
    setup: Setup, runs: pd.DataFrame, predictions: pd.DataFrame, tuning: pd.DataFrame
) -> str:
    motion = (
        f" It runs in slow motion: everything takes {setup.slowdown:g} times as long, and the "
        "figures here are the device's own."
        if setup.slowdown != 1
        else ""
    )
    head = (
        f"## {setup.title}\n\n{runs['window'].nunique()} parts of {runs['num_offered'].max()} "
        f"requests; TTFT {setup.base_s:g} s and twice the prompt's unloaded prefill, TPOT "
        f"{1000 * setup.tpot_s:g} ms.{motion}"
    )
    return "\n\n".join([head, _tuned(tuning, setup), _table(runs, predictions), _gains(runs)])


def _tuned(tuning: pd.DataFrame, setup: Setup) -> str:
    if tuning.empty:
        return "vLLM's budget was not tuned by measurement here."
    means = tuning.groupby("max_num_batched_tokens")["attainment"].mean()
    said = ", ".join(f"{budget}: {share:.1%}" for budget, share in means.items())
    counted = sorted(tuning["rate"].unique())
    rates = ", ".join(f"{rate:g}" for rate in counted)
    others = "" if {*setup.rates} <= {*counted} else "; other heats were too disturbed to count"
    return (
        "The share in time with vLLM's own scheduler, on a part of the trace that is not measured "
        f"below, by `--max-num-batched-tokens` (at {rates}/s{others}): {said}."
    )


def _table(runs: pd.DataFrame, predictions: pd.DataFrame) -> str:
    lines = [
        "| offered/s | scheduler | good/s | in time | simulated | TTFT p99 | TPOT p99 | rejected "
        "| API server | engine |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rate in sorted(runs["rate"].unique()):
        for system in _systems(runs):
            rows = runs[(runs["rate"] == rate) & (runs["system"] == system)]
            if rows.empty:
                continue
            said = predictions[(predictions["rate"] == rate) & (predictions["system"] == system)]
            said = said[said["window"].isin(rows["window"])]
            good, share = mean_of(_values(rows, rate)), mean_of(rows["attainment"].to_numpy(float))
            cells = [
                f"{rate:g}",
                f"`{system}`",
                f"{good.value:.3g} ± {good.reach:.2g}",
                f"{share.value:.1%} ± {100 * share.reach:.1f}",
                f"{said['attainment'].mean():.1%}" if len(said) else "–",
                f"{rows['ttft_p99_s'].mean():.2f} s",
                f"{1000 * rows['tpot_p99_s'].mean():.0f} ms",
                f"{rows['num_rejected'].sum() / rows['num_offered'].sum():.1%}",
                f"{rows['api_busy'].mean():.2f} ({rows['api_waited'].mean():.2f})",
                f"{rows['engine_busy'].mean():.2f} ({rows['engine_waited'].mean():.2f})",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + (
        "\n\nAPI server, engine: the share of the time in which its main thread ran, and in "
        "brackets the share in which it waited for a core."
    )


def _gains(runs: pd.DataFrame) -> str:
    return "\n".join(
        f"- at {gain.rate:g}/s `{gain.system}` serves {gain.more.value:+.3g} ± "
        f"{gain.more.reach:.2g} good requests/s against vLLM's own scheduler ({gain.times:.2f} "
        f"times as many): {'surely more' if gain.is_sure else 'not surely more'}"
        for gain in gains(runs)
    )


def _predictions(runs: pd.DataFrame, predictions: pd.DataFrame) -> str:
    if predictions.empty:
        return ""
    errors = prediction_errors(runs, predictions)
    within = (errors["points"].abs() <= _POINTS).sum()
    worst = max(errors.to_dict("records"), key=lambda row: abs(row["points"]))
    groups = [group for _, group in errors.groupby(["setup", "rate"])]
    ranked = sum(same_ranking(group) for group in groups)
    told = "; ".join(
        f"{name}: {ServerTime(first['per_request_s'], 0.0, first['per_step_host_s'])}"
        for name, first in predictions.groupby("setup").first().iterrows()
    )
    return (
        "## The simulator\n\nThe latency model was fitted to the steps that slosched recorded "
        "inside vLLM's engine during these runs. What the server adds to these steps was learnt "
        "from the runs at the lowest rate, where hardly any request waits (in wall time; "
        f"{told}). {within} of {len(errors)} mean attainments are within {_POINTS:g} points of "
        f"the measured ones; the worst is {worst['points']:+.1f} points off "
        f"(`{worst['system']}` at {worst['rate']:g}/s, {worst['setup']}). The schedulers are "
        f"ranked as measured in {ranked} of {len(groups)} cases (two within 2 points count as "
        "equal)."
    )


def _foot(runs: pd.DataFrame) -> str:
    digests = ", ".join(sorted(runs["code_digest"].astype(str).unique()))
    machines = ", ".join(sorted(runs["machine"].astype(str).unique()))
    late_ms = 1000 * (runs["max_lateness_s"] / runs["slowdown"]).max()
    return (
        f"Measured from {runs['made'].min()} to {runs['made'].max()} on 2 cores ({machines}), code "
        f"{digests}. The client sent no request more than {late_ms:.0f} ms late (in the device's "
        "time). The numbers are in "
        "[experiments/inside_vllm/results](../experiments/inside_vllm/results)."
    )


def _systems(runs: pd.DataFrame) -> list[str]:
    """Return the names of the systems, vLLM's own scheduler first."""
    return sorted(runs["system"].unique(), key=lambda name: (not name.startswith("vLLM "), name))


def _values(rows: pd.DataFrame, rate: float) -> npt.NDArray[np.float64]:
    return rows[rows["rate"] == rate]["good_requests_per_s"].to_numpy(float)
