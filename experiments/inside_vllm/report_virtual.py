"""The part of the page that tells what was played in virtual time, and how real time agrees."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.arena.figures import save
from experiments.inside_vllm.compare import Gain, gains, mean_of, prediction_errors
from experiments.inside_vllm.report_parts import (
    goodput_figure,
    heading,
    systems_of,
    tuned,
    values_at,
)
from experiments.inside_vllm.results import PREDICTIONS, RUNS, SAMPLE, SAMPLE_VIRTUAL, TUNING, Book
from experiments.inside_vllm.setups import Setup
from experiments.inside_vllm.virtual_setups import VIRTUAL_SETUPS
from experiments.markdown import table

_FIGURE = "virtual_time.svg"


def virtual_parts(book: Book, real: pd.DataFrame, folder: Path) -> list[str]:
    """Return this part in Markdown, and save its figure in `folder`.

    `real` are the runs through real servers, with which those in virtual time are compared.
    Nothing is told of what is incomplete.
    """
    runs = pd.concat([complete(book.of(RUNS, name), s) for name, s in VIRTUAL_SETUPS.items()])
    if runs.empty:
        return []
    predictions = book.read(PREDICTIONS)
    shown = predictions[predictions["system"].isin(set(runs["system"]))]
    save(goodput_figure(VIRTUAL_SETUPS, _without_finalists(runs), shown), folder / _FIGURE)
    parts = [_HEAD, f"![Good requests/s against requests/s offered]({folder.name}/{_FIGURE})"]
    for name, setup in VIRTUAL_SETUPS.items():
        here = runs[runs["setup"] == name]
        if len(here):
            told = [heading(setup, here), tuned(book.of(TUNING, name), setup)]
            parts += [*told, _table(here, shown[shown["setup"] == name], setup)]
    parts += [_agreement(book, runs, real), _simulated(runs, shown), _foot(runs)]
    return parts


_HEAD = (
    "## In virtual time\n\n"
    "All figures down to [real servers](#through-real-servers) are of virtual time "
    "([what that is](vllm.md#in-virtual-time)): vLLM's engine core, scheduler and KV cache manager "
    "are real, the device is emulated, and the clock moves to the end of each step at once. There "
    "is no API server, and computing takes no time, neither vLLM's own nor a policy's. "
    "`goodput+door` is the default inside vLLM. Policies with further options are finalists of "
    "[the arena](arena.md), with the options that it found for them. The column *against vLLM's "
    "own* is paired: good requests/s beyond those of vLLM's own scheduler on the same parts."
)


def complete(runs: pd.DataFrame, setup: Setup) -> pd.DataFrame:
    """Return the runs of the systems that have played every part of the setup at every rate."""
    wanted = {(rate, part) for rate in setup.rates for part in range(setup.num_parts)}
    runs = runs[pd.MultiIndex.from_frame(runs[["rate", "window"]]).isin(list(wanted))]
    counts = runs["system"].map(runs["system"].value_counts())
    return runs[counts == len(wanted)]


def _without_finalists(runs: pd.DataFrame) -> pd.DataFrame:
    ours = {policy for setup in VIRTUAL_SETUPS.values() for policy in setup.policies}
    return runs[runs["system"].isin(ours) | runs["system"].str.startswith("vLLM ")]


def _table(runs: pd.DataFrame, predictions: pd.DataFrame, setup: Setup) -> str:
    more = {(gain.rate, gain.system): gain for gain in gains(runs)}
    rows = []
    for rate in sorted(runs["rate"].unique()):
        for system in systems_of(runs):
            played = runs[(runs["rate"] == rate) & (runs["system"] == system)]
            said = predictions[(predictions["rate"] == rate) & (predictions["system"] == system)]
            good, share = (
                mean_of(values_at(played, rate)),
                mean_of(played["attainment"].to_numpy(float)),
            )
            rows.append(
                [
                    f"{rate:g}",
                    _named(system, played, setup),
                    f"{good.value:.3g} ± {good.reach:.2g}",
                    f"{share.value:.1%} ± {100 * share.reach:.1f}",
                    f"{said['attainment'].mean():.1%}" if len(said) else "–",
                    f"{played['ttft_p99_s'].mean():.2f} s",
                    f"{1000 * played['tpot_p99_s'].mean():.0f} ms",
                    f"{played['num_rejected'].sum() / played['num_offered'].sum():.1%}",
                    _told(more.get((rate, system))),
                ]
            )
    heads = ["offered/s", "scheduler", "good/s", "in time", "simulated", "TTFT p99", "TPOT p99"]
    return table([*heads, "rejected", "against vLLM's own"], rows)


def _named(system: str, played: pd.DataFrame, setup: Setup) -> str:
    budget = played["max_num_batched_tokens"].iloc[0]
    is_usual = system.startswith("vLLM ") or budget == setup.policy_budget
    return f"`{system}`" if is_usual else f"`{system}`, at most {budget} tokens a step"


def _told(gain: Gain | None) -> str:
    if gain is None:
        return "–"
    return (
        f"{gain.more.value:+.3g} ± {gain.more.reach:.2g} ({gain.times:.2f} times as many): "
        f"{gain.verdict}"
    )


def _agreement(book: Book, runs: pd.DataFrame, servers: pd.DataFrame) -> str:
    sample = book.valid(SAMPLE)
    told = ["### Virtual time against real time"]
    if len(sample):
        slowdowns = ", ".join(f"{factor:g}" for factor in sorted(sample["slowdown"].unique()))
        what = (
            "**The same without the warp.** Some parts were played to the same engine core by the "
            "same client in real time, and once more in virtual time. Both are in slow motion "
            f"({slowdowns} times as long), so that a busy machine matters little."
        )
        told += [_compared(book.valid(SAMPLE_VIRTUAL), sample, what)]
    if servers["setup"].isin(runs["setup"]).any():
        what = (
            "**Through real servers.** These are the parts of the [measurement with API servers]"
            "(#through-real-servers), which is of older code, where the same scheduler with the "
            "same options played the same requests. There a request takes time before and after "
            "the engine, which counts against its TTFT, and `slo_aware` leaves no time for that."
        )
        told += [_compared(runs, servers, what)]
    return "\n\n".join(told)


def _compared(virtual: pd.DataFrame, real: pd.DataFrame, what: str) -> str:
    """Return a table of attainments on the same parts, in virtual and in real time."""
    errors = prediction_errors(real, virtual)
    keys = ["setup", "rate", "window", "system"]
    both = real.merge(virtual[keys], on=keys)
    rows = [
        [
            row["setup"],
            f"{row['rate']:g}",
            f"`{row['system']}`",
            both.groupby(keys[:2])["window"].nunique()[row["setup"], row["rate"]],
            f"{row['attainment']:.1%}",
            f"{row['attainment_predicted']:.1%}",
            f"{row['points']:+.1f}",
        ]
        for row in errors.to_dict("records")
    ]
    mean, most = errors["points"].abs().mean(), errors["points"].abs().max()
    heads = ["setup", "offered/s", "scheduler", "parts", "real time", "virtual time", "points"]
    return (
        f"{what} The difference is {mean:.2f} points in the mean and {most:.1f} at most.\n\n"
        + table(heads, rows, num_texts=3)
    )


def _simulated(runs: pd.DataFrame, predictions: pd.DataFrame) -> str:
    if predictions.empty:
        return ""
    errors = prediction_errors(runs, predictions)
    worst = max(errors.to_dict("records"), key=lambda row: abs(row["points"]))
    return (
        "The column *simulated* is slosched's own simulator on the same device, without noise. "
        f"{(errors['points'].abs() <= 1).sum()} of {len(errors)} mean attainments are within 1 "
        f"point of those in virtual time; the worst is {worst['points']:+.1f} points off "
        f"(`{worst['system']}` at {worst['rate']:g}/s, {worst['setup']})."
    )


def _foot(runs: pd.DataFrame) -> str:
    speeds = runs.groupby("setup")[["device_s", "cpu_s"]].sum()
    told = ", ".join(
        f"{name} {row['device_s'] / row['cpu_s']:.0f}" for name, row in speeds.iterrows()
    )
    return (
        f"Played from {runs['made'].min()} to {runs['made'].max()} "
        f"({', '.join(sorted(runs['machine'].unique()))}), vLLM "
        f"{', '.join(sorted(runs['vllm'].unique()))}, code "
        f"{', '.join(sorted(runs['code_digest'].unique()))}. Seconds of the device for each second "
        f"of processor time, without the start of the process: {told}. The numbers are in "
        "[experiments/inside_vllm/results/virtual_time]"
        "(../experiments/inside_vllm/results/virtual_time)."
    )
