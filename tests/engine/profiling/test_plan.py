"""A plan covers the regimes within the limits, with few batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slosched.engine.profiling import ProfileLimits, plan_batches
from slosched.engine.profiling.plan import PlannedBatch, reference_batch
from slosched.perfmodel import Measurement

LIMITS = ProfileLimits(
    max_num_batched_tokens=512,
    max_num_seqs=16,
    max_context_tokens=2048,
    num_blocks=1024,
    block_size=16,
    num_host_blocks=256,
)


def measured(batch: PlannedBatch) -> Measurement:
    return Measurement(batch.chunks, 1.0, num_swapped_blocks=batch.num_swapped_blocks)


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
    for batch in plan_batches(limits, num_batches=40):
        assert batch.chunks
        assert sum(new for new, _ in batch.chunks) <= limits.max_num_batched_tokens
        assert len(batch.chunks) <= limits.max_num_seqs
        assert all(new >= 1 and prior >= 0 for new, prior in batch.chunks)
        assert all(new + prior <= limits.max_context_tokens for new, prior in batch.chunks)
        blocks = sum(-(-(new + prior) // limits.block_size) for new, prior in batch.chunks)
        assert blocks + batch.num_swapped_blocks <= limits.num_blocks
        assert batch.num_swapped_blocks <= limits.num_host_blocks
    assert reference_batch(limits).chunks


@pytest.mark.parametrize("num_batches", [40, 120, 400])
def test_any_beginning_of_the_plan_has_seen_every_regime(num_batches: int) -> None:
    plan = plan_batches(LIMITS, num_batches=num_batches)
    assert len(plan) <= num_batches
    assert {measured(b).regime for b in plan[:5]} == {"decode", "prefill", "mixed", "swap"}
    share = sum(measured(b).regime == "mixed" for b in plan) / len(plan)
    assert 0.25 < share < 0.8


def test_no_batch_is_planned_twice() -> None:
    plan = plan_batches(LIMITS, num_batches=400)
    assert len(set(plan)) == len(plan)


def test_the_plan_reaches_the_ends_of_every_size() -> None:
    plan = plan_batches(LIMITS, num_batches=120)
    shapes = [measured(b).shape for b in plan]
    assert min(s.num_tokens for s in shapes) == 1
    assert max(s.num_tokens for s in shapes) == LIMITS.max_num_batched_tokens
    assert max(s.num_reqs for s in shapes) == LIMITS.max_num_seqs
    assert max(s.max_context_tokens for s in shapes) == LIMITS.max_context_tokens
    assert {b.swaps_in for b in plan if b.num_swapped_blocks} == {False, True}
    cached = [sum(new + prior for new, prior in b.chunks) for b in plan]
    assert max(cached) > 0.9 * LIMITS.num_blocks * LIMITS.block_size, "a cache that is full"


def test_mixes_fill_their_space_evenly() -> None:
    """Each of three sizes is cut into thirds on a log scale, and no combination may be empty."""
    plan = plan_batches(LIMITS, num_batches=400)
    shapes = [measured(b).shape for b in plan if measured(b).regime == "mixed"]
    sizes = np.log(
        [
            (s.num_prefill_tokens, s.num_decodes, s.decode_context_tokens / s.num_decodes)
            for s in shapes
        ]
    )
    low, high = sizes.min(axis=0), sizes.max(axis=0)
    cells = {tuple(c) for c in np.minimum(2, (3 * (sizes - low) / (high - low)).astype(int))}
    assert len(cells) == 27


def test_a_plan_is_the_same_for_the_same_seed() -> None:
    assert plan_batches(LIMITS, seed=3) == plan_batches(LIMITS, seed=3)
    assert plan_batches(LIMITS, seed=3) != plan_batches(LIMITS, seed=4)


def test_an_empty_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="a plan needs at least one batch, not 0"):
        plan_batches(LIMITS, num_batches=0)
