"""Measurements contain only the device's time, whatever the machine does in between."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
from factories import make_model

from slosched.core import ScheduledBatch, StepResult
from slosched.engine.profiling import PlannedBatch, ProfileLimits, Progress, measure, plan_batches
from slosched.engine.profiling.measure import is_stable
from slosched.perfmodel import Profile, fit

DEVICE = make_model()
LIMITS = ProfileLimits(
    max_num_batched_tokens=512,
    max_num_seqs=16,
    max_context_tokens=2048,
    num_blocks=1024,
    block_size=16,
    num_host_blocks=256,
)
PLAN = plan_batches(LIMITS, num_batches=60)


class Machine:
    """A device whose step time is a model's, times a factor that may depend on when it is asked."""

    def __init__(self, factor: Callable[[int, float], float] = lambda _count, _now_s: 1.0) -> None:
        self._factor = factor
        self.batches: list[ScheduledBatch] = []
        self.now_s = 0.0

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.batches.append(batch)
        seconds = DEVICE.predict(batch.shape) * self._factor(len(self.batches), self.now_s)
        self.now_s += seconds
        return StepResult({}, frozenset(), seconds)

    def release(self, request_id: str) -> None:
        pass


def test_on_a_quiet_device_three_passes_are_enough_and_the_fit_finds_it() -> None:
    progress = Progress(len(PLAN))
    rows = tuple(measure(Machine(), LIMITS, PLAN, progress=progress))
    counts = Counter((r.chunks, r.num_swapped_blocks) for r in rows)
    assert set(counts.values()) == {3}
    assert progress.num_stable == len(PLAN)
    for row in rows:
        assert row.seconds == pytest.approx(DEVICE.predict(row.shape))
    assert fit(Profile(rows), "linear").held_out.mape < 1e-3


def test_noisy_batches_are_measured_until_the_passes_end() -> None:
    rng = np.random.default_rng(0)
    machine = Machine(lambda _count, _now_s: float(rng.lognormal(0, 0.3)))
    rows = list(measure(machine, LIMITS, PLAN[:10], max_passes=7))
    counts = Counter((r.chunks, r.num_swapped_blocks) for r in rows)
    assert max(counts.values()) == 7


def test_each_pass_runs_the_batches_in_another_order() -> None:
    rows = list(measure(Machine(), LIMITS, PLAN, max_passes=2))
    first, second = rows[: len(PLAN)], rows[len(PLAN) :]
    assert [r.chunks for r in first] == [b.chunks for b in PLAN]
    assert sorted(r.chunks for r in second) == sorted(r.chunks for r in first)
    assert [r.chunks for r in second] != [r.chunks for r in first]


def test_drift_of_the_machine_is_taken_out() -> None:
    """Speed varies by a factor of 1.5 over minutes: raw times are 20 % off, merged ones not."""
    machine = Machine(lambda _count, now_s: 1.25 + 0.25 * math.sin(now_s / 60))
    rows = tuple(measure(machine, LIMITS, PLAN, max_passes=3))
    raw = Profile(tuple(r.__class__(r.chunks, r.seconds, r.num_swapped_blocks) for r in rows))
    assert error(Profile(rows).merged()) < 0.25 * error(raw)
    assert error(Profile(rows).merged()) < 0.03


def error(profile: Profile) -> float:
    """Return the mean relative error around the best constant factor."""
    ratios = np.array([m.seconds / DEVICE.predict(m.shape) for m in profile.measurements])
    return float(np.abs(ratios / np.median(ratios) - 1).mean())


def test_stalled_steps_do_not_spoil_a_batch() -> None:
    """Every eleventh step takes ten times as long."""
    machine = Machine(lambda count, _now_s: 10.0 if count % 11 == 0 else 1.0)
    rows = tuple(measure(machine, LIMITS, PLAN, max_passes=7))
    merged = Profile(rows).merged().measurements
    wrong = [m for m in merged if m.seconds > 1.05 * DEVICE.predict(m.shape)]
    assert len(wrong) <= 0.03 * len(merged)


def test_a_run_goes_on_where_another_stopped() -> None:
    known = list(islice(measure(Machine(), LIMITS, PLAN, max_passes=3), 80))
    progress = Progress(len(PLAN))
    rest = list(measure(Machine(), LIMITS, PLAN, max_passes=3, known=known, progress=progress))
    assert progress.num_stable == len(PLAN)
    at_once = list(measure(Machine(), LIMITS, PLAN, max_passes=3))
    keys = [
        Counter((r.chunks, r.num_swapped_blocks) for r in rows)
        for rows in (at_once, [*known, *rest])
    ]
    assert keys[0] == keys[1]
    progress = Progress(len(PLAN))
    everything = [*known, *rest]
    assert not list(measure(Machine(), LIMITS, PLAN, known=everything, progress=progress))
    assert progress.num_stable == len(PLAN), "those of the earlier run count"


class OutOfMemoryError(RuntimeError):
    """An error with the name of torch's, by which it is recognized."""


class Small(Machine):
    """A device without memory for more than 256 tokens."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def execute(self, batch: ScheduledBatch) -> StepResult:
        if batch.shape.num_tokens > 256:
            raise self._error
        return super().execute(batch)


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("tried to allocate 1 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."),
        MemoryError(),
    ],
)
def test_a_batch_without_memory_is_left_out_and_the_run_goes_on(error: Exception) -> None:
    progress = Progress(len(PLAN))
    rows = list(measure(Small(error), LIMITS, PLAN, max_passes=2, progress=progress))
    large = {b for b in PLAN if sum(new for new, _ in b.chunks) > 256}
    assert set(progress.skipped) == large != set()
    assert len(rows) == 2 * (len(PLAN) - len(large))


class Broken(Machine):
    def execute(self, batch: ScheduledBatch) -> StepResult:
        raise RuntimeError("the kernel crashed")


def test_any_other_fault_of_the_device_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="the kernel crashed"):
        next(measure(Broken(), LIMITS, PLAN))


def test_swaps_go_in_both_directions() -> None:
    machine = Machine()
    out = PlannedBatch(((1, 32),), 8)
    back = PlannedBatch(((1, 33),), 8, swaps_in=True)
    list(measure(machine, LIMITS, [out, back], max_passes=1))
    swapped = [b for b in machine.batches if b.shape.num_swapped_blocks]
    assert [(len(b.swap_out), len(b.swap_in)) for b in swapped] == [(8, 0), (0, 8)]


def test_stable_means_the_median_is_known() -> None:
    assert not is_stable([1.0, 1.0])
    assert is_stable([1.0, 1.0, 1.0])
    assert not is_stable([1.0, 1.2, 0.8])
    assert is_stable([1.0, 1.01, 0.99, 1.0, 7.0, 1.0, 1.01])


def test_no_passes_measure_nothing_and_are_refused() -> None:
    with pytest.raises(ValueError, match="max_passes must be at least 1, not 0"):
        next(measure(Machine(), LIMITS, PLAN, max_passes=0))
