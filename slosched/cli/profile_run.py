"""A profiling run, as `profile` and `serve` do it: resumable and with a progress bar."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from slosched.cli.console import console, progress_bar
from slosched.core import Executor, Limits
from slosched.engine.profiling import ProfileLimits, Progress, measure, plan_batches
from slosched.perfmodel import Measurement, Profile, read_profile, write_profile
from slosched.perfmodel.measurement import MeasurementError, append_measurement

MIN_ROWS = 24
"""A time limit stops a run only after this many rows, which a fit and its hold-out need."""
_CHANGES = {"date"}
"""The facts that may differ between a profile and the run that continues it."""
_SAID_FIRST = {"device", "model"}
"""The facts that are named first where several differ, since others follow from them."""


@dataclass(frozen=True)
class ProfileRun:
    """The extent of a profiling run."""

    num_batches: int = 120
    max_passes: int = 7
    time_limit_s: float = 600.0
    max_context_tokens: int | None = None
    seed: int = 0
    overwrite: bool = False


class Measured(Protocol):
    """A model on a device, in any engine, whose steps can be timed."""

    @property
    def name(self) -> str: ...
    @property
    def executor(self) -> Executor: ...
    def provenance(self) -> dict[str, str]:
        """Return the facts about model, device and engine to store with a measurement."""

    def profile_limits(self, limits: Limits, max_context_tokens: int | None) -> ProfileLimits:
        """Return the limits that planned batches have to respect."""


def run_profile(local: Measured, limits: Limits, out: Path, run: ProfileRun) -> Profile:
    """Measure a plan of batches, and append every row to `out` as soon as it is measured.

    If `out` is already a profile of the same model, device and plan, the run continues it. Raise
    MeasurementError if `out` is a profile of anything else; the file stays as it is.
    """
    shape_limits = local.profile_limits(limits, run.max_context_tokens)
    provenance = {
        **local.provenance(),
        "plan": f"{run.num_batches} batches, seed {run.seed}, "
        f"{shape_limits.max_num_batched_tokens} tokens, {shape_limits.max_num_seqs} requests, "
        f"contexts to {shape_limits.max_context_tokens}",
    }
    known = [] if run.overwrite else _continued(out, provenance)
    if known:
        said = f"{out} holds {len(known)} rows of this plan: going on (--overwrite: anew)"
        console.print(said, markup=False)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_profile(Profile((), provenance), out)
    rows = [*known, *_measure(local, shape_limits, out, run, known)]
    return Profile(tuple(rows), provenance)


def begun_profile(out: Path) -> Profile | None:
    """Return the profile that `out` has so far; None if the file does not exist or is empty."""
    if not out.exists() or out.stat().st_size == 0:
        return None
    return read_profile(out, may_be_empty=True)


def _continued(out: Path, provenance: dict[str, str]) -> list[Measurement]:
    """Return the rows that `out` already has; none if the file does not exist or is empty."""
    if (found := begun_profile(out)) is None:
        return []
    names = (provenance.keys() | found.provenance.keys()) - _CHANGES
    for name in sorted(names, key=lambda name: (name not in _SAID_FIRST, name)):
        ours, theirs = provenance.get(name, ""), found.provenance.get(name, "")
        if ours != theirs:
            raise MeasurementError(
                f"{out} is a profile with another {name} ({theirs!r}, now {ours!r}): nothing is "
                "written; name another file with --out, or use --overwrite"
            )
    return list(found.measurements)


def _measure(
    local: Measured, limits: ProfileLimits, out: Path, run: ProfileRun, known: list[Measurement]
) -> list[Measurement]:
    plan = plan_batches(limits, num_batches=run.num_batches, seed=run.seed)
    done = Progress(len(plan))
    rows: list[Measurement] = []
    with progress_bar() as bar:
        task = bar.add_task(f"profiling {local.name}", total=run.time_limit_s)
        taken = measure(
            local.executor,
            limits,
            plan,
            max_passes=run.max_passes,
            seed=run.seed,
            known=known,
            progress=done,
        )
        for row in taken:
            append_measurement(row, out)
            rows.append(row)
            elapsed_s = bar.tasks[task].elapsed or 0.0
            share = _share_done(len(known) + len(rows), len(plan), run, done)
            bar.update(
                task,
                completed=max(elapsed_s, share * run.time_limit_s),
                description=f"profiling {local.name}: {len(rows)} steps, "
                f"{done.num_stable} of {len(plan)} batches stable",
            )
            if elapsed_s > run.time_limit_s and len(known) + len(rows) >= MIN_ROWS:
                break
        bar.update(task, completed=run.time_limit_s)
    _report(done)
    return rows


def _share_done(num_rows: int, num_planned: int, run: ProfileRun, done: Progress) -> float:
    saved = done.num_stable * max(0, run.max_passes - 3)
    return min(1.0, num_rows / max(1, num_planned * run.max_passes - saved))


def _report(done: Progress) -> None:
    for batch, reason in done.skipped.items():
        console.print(f"left out for lack of memory: {len(batch.chunks)} requests ({reason})")
    if len(done.reference_s) > 1:
        usual_s = statistics.median(done.reference_s)
        low, high = np.percentile(done.reference_s, (5, 95)) / usual_s
        console.print(
            f"one batch, measured {len(done.reference_s)} times in between, took {low:.2f} to "
            f"{high:.2f} times its median (5 to 95 %): the fit takes this drift out"
        )


def summary(profile: Profile, block_bytes: int) -> str:
    """Return a sentence on how many steps were measured, their spread, and the swap bandwidth."""
    merged = profile.merged().measurements
    spreads = [100 * m.spread_s / m.seconds for m in merged if m.repeats > 1]
    spread = f", median spread ±{statistics.median(spreads):.1f} %" if spreads else ""
    said = f"{len(profile.measurements)} steps of {len(merged)} batches{spread}"
    rate = _swap_rate(merged, block_bytes)
    return f"{said}; swapping moves {rate / 1e9:.2f} GB/s" if rate else said


def _swap_rate(merged: tuple[Measurement, ...], block_bytes: int) -> float:
    """Return bytes/s from the slope of swap times over swap sizes, or 0 if no slope is visible."""
    swaps = [(m.num_swapped_blocks, m.seconds) for m in merged if m.num_swapped_blocks]
    if len({size for size, _ in swaps}) < 2:
        return 0.0
    blocks, seconds = (np.array(values, dtype=np.float64) for values in zip(*swaps, strict=True))
    slope = float(np.polyfit(blocks, seconds, 1)[0])
    return block_bytes / slope if slope > 0 else 0.0
