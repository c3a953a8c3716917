"""Stress batches keep their limits and reach all corners of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slosched.perfmodel import Measurement
from slosched.perfmodel.stress import StressLimits, stress_batches


@given(
    limits=st.builds(
        StressLimits,
        max_num_batched_tokens=st.integers(32, 16_384),
        max_num_seqs=st.integers(1, 1024),
        max_context_tokens=st.integers(32, 131_072),
        kv_capacity_tokens=st.integers(32, 2_000_000),
    ),
    seed=st.integers(0, 100),
)
def test_every_batch_can_be_run(limits: StressLimits, seed: int) -> None:
    for batch in stress_batches(limits, 24, seed):
        assert 1 <= len(batch) <= limits.max_num_seqs
        assert sum(new for new, _ in batch) <= limits.max_num_batched_tokens
        assert sum(new + prior for new, prior in batch) <= limits.kv_capacity_tokens
        assert max(new + prior for new, prior in batch) <= limits.max_context_tokens
        assert min(new for new, _ in batch) >= 1
        assert min(prior for _, prior in batch) >= 0


def test_they_reach_every_regime_and_both_ends_of_every_size() -> None:
    limits = StressLimits()
    shapes = [Measurement(batch, 1.0) for batch in stress_batches(limits, 1000, 0)]
    shares = {
        regime: sum(m.regime == regime for m in shapes) / 1000
        for regime in ("decode", "prefill", "mixed")
    }
    assert shares == pytest.approx({"decode": 0.33, "prefill": 0.15, "mixed": 0.52}, abs=0.01)
    chunks = [chunk for m in shapes for chunk in m.chunks if chunk[0] > 1]
    assert min(new for new, _ in chunks) == 16
    assert max(new for new, _ in chunks) > 7000
    assert 0.3 < sum(prior == 0 for _, prior in chunks) / len(chunks) < 0.5
    assert max(prior for _, prior in chunks) > 30_000
    assert {m.shape.num_prefills for m in shapes} == {0, 1, 2, 3, 4}
    decodes = [m.shape for m in shapes if m.shape.num_decodes]
    assert {1, 2, 4} < {s.num_decodes for s in decodes}
    assert max(s.num_decodes for s in decodes) > 480
    alone = [s.max_context_tokens for s in decodes if s.num_decodes == 1 and not s.num_prefills]
    assert max(alone) > 30_000


def test_the_same_seed_gives_the_same_batches() -> None:
    limits = StressLimits()
    assert stress_batches(limits, 30, 7) == stress_batches(limits, 30, 7)
    assert stress_batches(limits, 30, 7) != stress_batches(limits, 30, 8)


@pytest.mark.parametrize(
    "field", ["max_num_batched_tokens", "max_num_seqs", "max_context_tokens", "kv_capacity_tokens"]
)
def test_a_limit_that_leaves_no_room_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least .*, not 0"):
        StressLimits(**{field: 0})


def test_no_batches_are_no_plan() -> None:
    with pytest.raises(ValueError, match="at least one batch, not 0"):
        stress_batches(StressLimits(), 0, 0)
