"""The table of replays side by side, for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.measure import Measurement
from rich.table import Table

from slosched.cli.console import console, table
from slosched.metrics import Summary
from slosched.metrics.rows import RequestRows
from slosched.metrics.summary import percentiles

WORST_COLUMN = "worst\ntenth"
COLUMNS = (
    "policy",
    "good/s",
    "good",
    WORST_COLUMN,
    "rejected",
    "TTFT\np50",
    "TTFT\np99",
    "TPOT\np50",
    "TPOT\np99",
)
"""The columns of every table. They fit into 100 characters; a report has every metric."""
BOUND_COLUMN = "÷\nbound"
CACHED_COLUMN = "prompt\ncached"
PROGRAMS_COLUMN = "programs\non time"
GPU_COLUMN = "GPU\nseconds"
_WIDER_THAN_ANY = 10_000
_FOLDED_NAME = len("rejected")
"""The width to which a long name is folded: below the widest heading, numbers are cut as well."""


def outcome_table(
    title: str,
    summaries: Mapping[str, Summary],
    shares: Mapping[str, float] | None = None,
    gpu_s: Mapping[str, float] | None = None,
) -> Table:
    """Return a table with a row for each policy.

    `shares` says which share of the bound on any scheduler each policy reached, where it is known,
    and `gpu_s` the GPU seconds of fleets.
    """
    heads = columns(summaries, shares, gpu_s)
    rows = outcome_rows(summaries, shares, gpu_s)
    made = table(title, heads, rows)
    if not _has_room(heads, rows):
        made.padding = (0, 0)
    return made


def _has_room(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Tell whether the numbers fit beside the names, which can be folded, with blanks around them.

    The terminal would else cut numbers short.
    """
    numbers = table("", heads[1:], [row[1:] for row in rows])
    unlimited = console.options.update(max_width=_WIDER_THAN_ANY)
    numbers_width = Measurement.get(console, unlimited, numbers).maximum
    name_width = min(_FOLDED_NAME, max(len(row[0]) for row in rows))
    return numbers_width + name_width + len("│  ") <= console.width


def rows_table(title: str, name: str, rows: RequestRows, offered_per_s: float) -> Table:
    """Return the same table where only a row is known of each request.

    The offered rate is inf or NaN where there is none, and then there is none of good requests.
    """
    heads = [head for head in COLUMNS if head != WORST_COLUMN]
    ttft_s, tpot_s = percentiles(rows.ttft_s), percentiles(rows.tpot_s)
    row = (
        name,
        _rate(rows.attainment * offered_per_s if math.isfinite(offered_per_s) else math.nan),
        _share(rows.attainment),
        _share(float(rows.is_rejected.mean())),
        *(_time(seconds) for each in (ttft_s, tpot_s) for seconds in (each.p50, each.p99)),
    )
    return table(title, heads, [row])


def columns(
    summaries: Mapping[str, Summary],
    shares: Mapping[str, float] | None,
    gpu_s: Mapping[str, float] | None,
) -> tuple[str, ...]:
    """Return the headings of the columns of `outcome_rows`."""
    cached = (CACHED_COLUMN,) if _any_cached(summaries) else ()
    programs = (PROGRAMS_COLUMN,) if _any_programs(summaries) else ()
    gpus = (GPU_COLUMN,) if gpu_s else ()
    return (*COLUMNS, *cached, *programs, *gpus, *(() if shares is None else (BOUND_COLUMN,)))


def outcome_rows(
    summaries: Mapping[str, Summary],
    shares: Mapping[str, float] | None,
    gpu_s: Mapping[str, float] | None,
) -> list[tuple[str, ...]]:
    """Return the cells of each policy's row."""
    any_cached, any_programs = _any_cached(summaries), _any_programs(summaries)
    rows = []
    for name, summary in summaries.items():
        row = _outcome_row(name, summary)
        if any_cached:
            row += (_share(summary.prefix_hit_rate),)
        if any_programs:
            row += (_share(summary.program_attainment),)
        if gpu_s:
            row += (f"{gpu_s[name]:,.0f}" if name in gpu_s else "-",)
        if shares is not None:
            row += (_share(shares.get(name, math.nan)),)
        rows.append(row)
    return rows


def _any_cached(summaries: Mapping[str, Summary]) -> bool:
    return any(summary.prefix_hit_rate > 0 for summary in summaries.values())


def _any_programs(summaries: Mapping[str, Summary]) -> bool:
    return any(summary.num_programs for summary in summaries.values())


def _outcome_row(name: str, summary: Summary) -> tuple[str, ...]:
    return (
        name,
        _rate(summary.good_requests_per_s),
        _share(summary.attainment),
        _share(summary.worst_decile_attainment),
        _share(summary.num_rejected / summary.num_offered),
        _time(summary.ttft_s.p50),
        _time(summary.ttft_s.p99),
        _time(summary.tpot_s.p50),
        _time(summary.tpot_s.p99),
    )


def _rate(per_s: float) -> str:
    return "-" if math.isnan(per_s) else f"{per_s:.3g}"


def _share(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
