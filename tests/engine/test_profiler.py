"""The profiler: a plan that covers the regimes within the limits, and times that are the device's."""

from __future__ import annotations

import pytest
from factories import make_model
from hypothesis import given, settings
from hypothesis import strategies as st

from slosched.engine.profiler import PlannedBatch, ProfileLimits, measure, plan_batches
from slosched.engine.simulated import SimulatedExecutor, VirtualClock
from slosched.perfmodel import Profile, fit

LIMITS = ProfileLimits(
    max_num_batched_tokens=512,
    max_num_seqs=16,
    max_context_tokens=2048,
    num_blocks=1024,
    block_size=16,
    num_host_blocks=256,
)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        ProfileLimits,
        max_num_batched_tokens=st.integers(1, 4096),
        max_num_seqs=st.integers(1, 300),
        max_context_tokens=st.integers(2, 9000),
        num_blocks=st.integers(1, 3000),
        block_size=st.sampled_from((1, 16)),
        num_host_blocks=st.integers(0, 300),
    )
)
def test_every_planned_batch_fits_the_device(limits: ProfileLimits) -> None:
    for batch in plan_batches(limits, num_random=20):
        assert batch.chunks
        assert sum(new for new, _ in batch.chunks) <= limits.max_num_batched_tokens
        assert len(batch.chunks) <= limits.max_num_seqs
        assert all(new + prior <= limits.max_context_tokens for new, prior in batch.chunks)
        blocks = sum(-(-(new + prior) // limits.block_size) for new, prior in batch.chunks)
        assert blocks + batch.num_swapped_blocks <= limits.num_blocks
        assert batch.num_swapped_blocks <= limits.num_host_blocks


def test_any_beginning_of_the_plan_has_seen_every_regime() -> None:
    executor = SimulatedExecutor(make_model(), VirtualClock(), {})
    measured = list(measure(executor, LIMITS, plan_batches(LIMITS)[:40], repeats=1))
    assert {m.regime for m in measured} == {"decode", "prefill", "mixed", "swap"}


def test_a_plan_is_the_same_for_the_same_seed() -> None:
    assert plan_batches(LIMITS, seed=3) == plan_batches(LIMITS, seed=3)
    assert plan_batches(LIMITS, seed=3) != plan_batches(LIMITS, seed=4)


def test_what_is_measured_is_what_the_device_takes_and_the_fit_finds_it() -> None:
    device = make_model()
    executor = SimulatedExecutor(device, VirtualClock(), {})
    measured = tuple(measure(executor, LIMITS, plan_batches(LIMITS), repeats=2))
    for row in measured:
        assert row.seconds == pytest.approx(device.predict(row.shape))
        assert row.spread_s == pytest.approx(0.0, abs=1e-12)
    assert fit(Profile(measured), "linear").held_out.mape < 1e-3


def test_no_repeats_measure_nothing_and_are_refused() -> None:
    executor = SimulatedExecutor(make_model(), VirtualClock(), {})
    with pytest.raises(ValueError, match="repeats must be at least 1, not 0"):
        next(measure(executor, LIMITS, [PlannedBatch(((1, 3),))], repeats=0))
