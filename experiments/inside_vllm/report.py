"""The page docs/inside_vllm.md; all its numbers and verdicts are made from the results."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.arena.figures import save
from experiments.inside_vllm.compare import gains, mean_of, prediction_errors, same_ranking
from experiments.inside_vllm.report_parts import (
    goodput_figure,
    heading,
    systems_of,
    tuned,
    values_at,
)
from experiments.inside_vllm.report_virtual import virtual_parts
from experiments.inside_vllm.results import PREDICTIONS, TUNING, Book
from experiments.inside_vllm.setups import SETUPS, Setup
from experiments.inside_vllm.virtual_time import VIRTUAL_RESULTS
from slosched.perfmodel import ServerTime

PAGE = Path(__file__).parents[2] / "docs" / "inside_vllm.md"
_POINTS = 5.0
"""The error in points within which a prediction counts as right."""


def write(page: Path = PAGE, book: Book | None = None, virtual: Book | None = None) -> None:
    """Write the page, and its figures into a folder with the same name.

    `book` has the runs through real servers, and `virtual` those in virtual time, if there are any.
    """
    book, virtual = book or Book(), virtual or Book(VIRTUAL_RESULTS)
    runs = book.shown()
    runs = runs[
        [rate in SETUPS[name].rates for name, rate in zip(runs["setup"], runs["rate"], strict=True)]
    ]
    if runs.empty:
        raise ValueError("nothing is measured: `python -m experiments.inside_vllm run` does it")
    predictions = book.read(PREDICTIONS)
    folder = page.with_suffix("")
    save(goodput_figure(SETUPS, runs, predictions), folder / "goodput.svg")
    parts = [_HEAD, *virtual_parts(virtual, runs, folder)]
    parts += real_parts(runs, predictions, book.valid(TUNING))
    page.write_text("\n\n".join(part for part in parts if part) + "\n")


def real_parts(runs: pd.DataFrame, predictions: pd.DataFrame, tuning: pd.DataFrame) -> list[str]:
    """Return what the page tells of the runs through real servers, in Markdown."""
    names = [name for name in SETUPS if (runs["setup"] == name).any()]
    parts = [_SERVERS, _FIGURE]
    for name in names:
        chosen = [frame[frame["setup"] == name] for frame in (runs, predictions, tuning)]
        parts += [_section(SETUPS[name], *chosen)]
    return [*parts, _predictions(runs, predictions), _foot(runs)]


_HEAD = (
    "# Inside vLLM: measured\n\n"
    "<!-- Made by `python -m experiments.inside_vllm report`; edit report.py there instead. -->\n\n"
    "Real vLLM 0.32.0 runs with its own scheduler at the `--max-num-batched-tokens` that the "
    "tables name, and with policies of slosched in front of it. Good requests are those served "
    "within their SLOs (TTFT, and TPOT as `vllm bench serve --goodput` defines it); rejected ones "
    "are not good. Intervals are 95 %, by Student's t over the parts of the trace. How it is done: "
    "[experiments/inside_vllm](../experiments/inside_vllm/README.md)."
)

_SERVERS = (
    "## Through real servers\n\n"
    "The figures from here on are of real time: vLLM's API server, engine core, scheduler and KV "
    "cache manager. All servers are up at the same time and get the same requests, together on an "
    "emulated device, in turns on a real one. A server that has to wait for a core looks worse "
    "than it is (the last columns)."
)

_FIGURE = (
    "![Good requests/s against requests/s offered](inside_vllm/goodput.svg)\n\n"
    "Lines are measured, with their intervals; rings are simulated; the dotted line is the load "
    "that was offered."
)


def _section(
    setup: Setup, runs: pd.DataFrame, predictions: pd.DataFrame, tuning: pd.DataFrame
) -> str:
    motion = (
        f" It runs in slow motion: everything takes {setup.slowdown:g} times as long, and the "
        "figures here are the device's own."
        if setup.slowdown != 1
        else ""
    )
    head = f"{heading(setup, runs)}{motion}"
    return "\n\n".join([head, tuned(tuning, setup), _table(runs, predictions), _gains(runs)])


def _table(runs: pd.DataFrame, predictions: pd.DataFrame) -> str:
    lines = [
        "| offered/s | scheduler | good/s | in time | simulated | TTFT p99 | TPOT p99 | rejected "
        "| API server | engine |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rate in sorted(runs["rate"].unique()):
        for system in systems_of(runs):
            rows = runs[(runs["rate"] == rate) & (runs["system"] == system)]
            if rows.empty:
                continue
            said = predictions[(predictions["rate"] == rate) & (predictions["system"] == system)]
            said = said[said["window"].isin(rows["window"])]
            good, share = (
                mean_of(values_at(rows, rate)),
                mean_of(rows["attainment"].to_numpy(float)),
            )
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
        f"times as many): {gain.verdict}"
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
        "### The simulator\n\nThe latency model was fitted to the steps that slosched recorded "
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
