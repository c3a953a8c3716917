"""The tables, report and files of `slosched capacity`.

Imports matplotlib and pandas, so other modules import it only when they need it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd
from rich.markup import escape
from rich.table import Table

from slosched.cli.console import console, table, what
from slosched.cli.figures import save_figures
from slosched.cli.promised import promised_in
from slosched.evaluate.capacity import Capacity, Flag, Measured, Ratio, Study
from slosched.evaluate.plots import attainment_curves, goodput_curves
from slosched.evaluate.report import Block, Section, write_report

_READ_WITH = {
    Flag.QUEUE_GROWS: "its queue still grows at that rate, so a longer trace would give less",
    Flag.SHORT: "half of each replay is warm-up and that is too short: raise -n",
}


def show(
    title: str,
    study: Study,
    measured: Mapping[str, Measured],
    targets: Sequence[float],
    bounds: Mapping[float, float],
) -> None:
    """Print a table for each target, and below them the promises and how to read the tables."""
    console.print(title)
    for target in targets:
        heading = f"{_share(target)} of the requests good"
        console.print(capacity_table(heading, study, target, bounds))
    if said := promised_in(study.windows):
        console.print(said)
    if bounds:
        console.print(_what_is_counted(measured))
    for note in notes(study, measured, targets, bounds):
        console.print(f"[yellow]note:[/] {escape(note)}")


def capacity_table(title: str, study: Study, target: float, bounds: Mapping[float, float]) -> Table:
    """Return a table with a row for each policy; ratios are relative to the first policy."""
    columns = ["policy", "requests/s", "95 % interval", "ratio", "95 % interval"]
    columns += ["÷ bound"] if bounds else []
    rows = [_row(study, name, target, bounds) for name in study.contenders]
    if target in bounds:
        rows.append(["any scheduler (bound)", f"≤ {bounds[target]:.3g}", "", "", "", ""])
    return table(title, columns, rows)


def leave_results(
    out: Path,
    title: str,
    study: Study,
    measured: Mapping[str, Measured],
    targets: Sequence[float],
    bounds: Mapping[float, float],
    replays: pd.DataFrame,
    provenance: Mapping[str, object],
) -> None:
    """Write the report, figures, curves and capacities to the folder `out`.

    All replays go there, too, as results.parquet.
    """
    curve = study.frame()
    capacities = capacity_frame(study, targets, bounds)
    curve.to_csv(out / "curves.csv", index=False)
    curve.to_parquet(out / "curves.parquet", index=False)
    capacities.to_csv(out / "capacities.csv", index=False)
    replays.to_parquet(out / "results.parquet", index=False)
    made = {
        "goodput": goodput_curves(curve),
        "attainment": attainment_curves(curve, list(targets)),
    }
    save_figures(out, made)
    text = (
        f"{title}. {promised_in(study.windows)} The capacity is the highest rate at which that "
        "share of the offered requests is good, where the curve through all seeds crosses it; "
        "rejected and unfinished requests count as misses, and each replay's warm-up is left out. "
        "In brackets 95 % intervals, by resampling blocks of requests and seeds. Every policy had "
        "the same requests at the same rates, and ratios to the first are resampled in pairs."
    )
    if bounds:
        text += f" {_what_is_counted(measured)}"
    said = "\n\n".join(notes(study, measured, targets, bounds))
    blocks: list[Block] = [text, capacities, *made.values()]
    if said:
        blocks.insert(1, said)
    sections = [Section("Capacity", blocks), Section("Curves", ["Every rate simulated.", curve])]
    write_report(out / "report.html", "Capacity", sections, provenance)


def capacity_frame(
    study: Study, targets: Sequence[float], bounds: Mapping[float, float]
) -> pd.DataFrame:
    """Return a frame with a row for each policy and target."""
    rows = []
    first = study.contenders[0]
    for target in targets:
        for name in study.contenders:
            found, ratio = study.capacity(name, target), study.ratio(name, first, target)
            bound = bounds.get(target, math.nan)
            rows.append(
                {
                    "policy": name,
                    "target": target,
                    "requests_per_s": found.requests_per_s,
                    "low": found.interval.low,
                    "high": found.interval.high,
                    "ratio": ratio.value,
                    "ratio_low": ratio.interval.low,
                    "ratio_high": ratio.interval.high,
                    "significant": "yes" if ratio.is_significant else "no",
                    "bound": bound,
                    "of_bound": found.requests_per_s / bound if bound else math.nan,
                    "flags": ", ".join(sorted(found.flags)),
                }
            )
    return pd.DataFrame(rows)


def notes(
    study: Study,
    measured: Mapping[str, Measured],
    targets: Sequence[float],
    bounds: Mapping[float, float] | None = None,
) -> Iterator[str]:
    """Yield a sentence for each failure, and for each caveat of the capacities and their bounds."""
    for name, one in measured.items():
        if one.error is not None:
            yield f"{name} was given up: {what(one.error)}"
        elif not one.complete:
            yield f"{name} was played by all seeds at no rate yet"
    for name in study.contenders:
        for target in targets:
            yield from _about(study.capacity(name, target))
    for target, most in (bounds or {}).items():
        yield from _beyond_the_bound(study, target, most)


def _what_is_counted(measured: Mapping[str, Measured]) -> str:
    """Return in a sentence that the bound is one on other requests than a capacity."""
    replays = [
        o for one in measured.values() for k in one.complete for o in one.outcomes[k].values()
    ]
    num_left_out = sum(int((~replay.counted).sum()) for replay in replays)
    share = num_left_out / max(1, sum(len(replay.counted) for replay in replays))
    return (
        "The bound is one on all requests of the windows, while a capacity leaves out the warm-up, "
        f"{100 * share:.0f} % of the replayed requests.  If those are easier than the rest, as "
        "after an idle start, the bound is higher than it need be, and if they are harder, a "
        "capacity may be above it."
    )


def _beyond_the_bound(study: Study, target: float, most: float) -> Iterator[str]:
    """Yield a sentence if a capacity is above the bound, which is one of another count."""
    above = [n for n in study.contenders if study.capacity(n, target).requests_per_s > most]
    if above:
        yield (
            f"at {_share(target)}, {' and '.join(above)} is above the bound: it counts all "
            "requests of a window and a capacity only those after the warm-up, which are the "
            "easier ones here: give more requests with -n or --seeds"
        )


def _about(found: Capacity) -> Iterator[str]:
    share = _share(found.target)
    if Flag.UNREACHABLE in found.flags:
        yield (
            f"{found.contender} reaches {share} at no rate that was tried: the best was "
            f"{_share(found.best_attainment)}, so its capacity is 0; the promise is too tight for "
            "this device and trace"
        )
    if Flag.NEVER_SATURATES in found.flags:
        yield (
            f"{found.contender} still reaches {share} at {found.requests_per_s:.4g} requests/s, "
            "the highest rate that was tried: raise --max-rate, or promise more with --slo-ttft "
            "and --slo-tpot, or give more requests with -n"
        )
    for flag, meaning in _READ_WITH.items():
        if flag in found.flags:
            yield f"{found.contender} at {share}: {meaning}"


def _row(study: Study, name: str, target: float, bounds: Mapping[float, float]) -> Sequence[str]:
    found, ratio = study.capacity(name, target), study.ratio(name, study.contenders[0], target)
    row = [name, *_capacity(found), *_ratio(ratio, name == study.contenders[0])]
    return [*row, f"{found.requests_per_s / bounds[target]:.2f}"] if bounds.get(target) else row


def _capacity(found: Capacity) -> tuple[str, str]:
    if Flag.UNREACHABLE in found.flags:
        return "0", ""
    if Flag.NEVER_SATURATES in found.flags:
        return f"≥ {found.requests_per_s:.3g}", ""
    marked = "*" if found.flags else ""
    low, high = found.interval
    return f"{marked}{found.requests_per_s:.3g}", f"[{low:.3g}, {high:.3g}]"


def _share(value: float) -> str:
    return f"{100 * value:.4g} %"


def _ratio(ratio: Ratio, is_first: bool) -> tuple[str, str]:
    if is_first or math.isnan(ratio.value):
        return "" if is_first else "-", ""
    unsure = "" if ratio.is_significant else " n.s."
    low, high = ratio.interval
    return f"x{ratio.value:.3f}{unsure}", f"[{low:.3f}, {high:.3f}]"
