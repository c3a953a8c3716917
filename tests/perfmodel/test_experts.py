"""The layers of a mixture of experts: how many experts a step touches, and what that costs."""

from __future__ import annotations

import numpy as np
import pytest
from aiconfigurator_tables import needs_tables
from hypothesis import given
from hypothesis import strategies as st

from slosched.perfmodel import FITTERS, Part
from slosched.perfmodel.aiconfigurator import Deployment, compose_profile
from slosched.perfmodel.errors import evaluate
from slosched.perfmodel.experts import ExpertLayers, touched_share
from slosched.perfmodel.table import Table

REST = Table((1, 2048), (0.002, 0.02))


def routed_share(
    num_tokens: int, num_experts: int, num_per_token: int, popularity: np.ndarray, seed: int = 0
) -> float:
    """Return the mean share of experts that are touched when each token draws distinct ones."""
    rng = np.random.default_rng(seed)
    draws = 60
    touched = 0
    for _ in range(draws):
        # The largest keys of log(popularity) + Gumbel noise are a draw without replacement.
        keys = np.log(popularity) + rng.gumbel(size=(num_tokens, num_experts))
        chosen = np.argpartition(-keys, num_per_token, axis=1)[:, :num_per_token]
        touched += len(np.unique(chosen))
    return touched / draws / num_experts


@pytest.mark.parametrize(("num_experts", "num_per_token"), [(8, 2), (32, 4), (128, 8)])
@pytest.mark.parametrize("num_tokens", [1, 3, 10, 40])
def test_even_routing_touches_as_many_experts_as_the_formula_says(
    num_experts: int, num_per_token: int, num_tokens: int
) -> None:
    drawn = routed_share(num_tokens, num_experts, num_per_token, np.ones(num_experts))
    [formula] = touched_share(np.array([float(num_tokens)]), num_per_token / num_experts, 1e6)
    assert formula == pytest.approx(drawn, rel=0.03)


@pytest.mark.parametrize("num_tokens", [4, 16, 64, 256])
def test_favourites_leave_other_experts_out(num_tokens: int) -> None:
    """A router whose popularity is gamma-distributed touches fewer experts, as `evenness` says."""
    evenness = 1.0
    rng = np.random.default_rng(3)
    drawn = np.mean(
        [
            routed_share(num_tokens, 64, 4, rng.gamma(evenness, size=64), seed=seed)
            for seed in range(8)
        ]
    )
    counts = np.array([float(num_tokens)])
    [formula] = touched_share(counts, 4 / 64, evenness)
    [even] = touched_share(counts, 4 / 64, 1e6)
    assert formula == pytest.approx(drawn, rel=0.1)
    assert formula < even


@given(
    counts=st.lists(st.integers(1, 20_000), min_size=2, max_size=9).map(sorted),
    share=st.floats(0.01, 0.9),
    evenness=st.floats(0.1, 100),
)
def test_more_tokens_touch_more_experts_and_never_more_than_all(
    counts: list[int], share: float, evenness: float
) -> None:
    seconds = ExpertLayers(0.03, evenness, share, REST).at(np.array(counts, dtype=float))
    assert np.all(np.diff(seconds) >= -1e-15)
    rest_s = REST.at(np.array(counts, dtype=float))
    assert np.all((seconds > rest_s) & (seconds <= rest_s + 0.03 * (1 + 1e-12)))


@needs_tables
@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"])
def test_on_real_tables_whole_steps_are_enough(model: str) -> None:
    """The form is fitted to 160 steps and judged on others, without a table of the layers."""
    fitted, judged = (
        compose_profile(Deployment("h100_sxm", model), num_steps=count, seed=seed)
        for count, seed in ((160, 0), (300, 1))
    )
    steps, others = (
        [m for m in profile.measurements if m.part is Part.STEP] for profile in (fitted, judged)
    )
    experts, roofline = (
        evaluate(FITTERS[form](steps, fitted.provenance, 0)[0], others)
        for form in ("experts-separate", "roofline")
    )
    assert experts.mape < 1.5
    assert experts.p99 < 6
    assert roofline.mape > 8


@pytest.mark.parametrize(
    ("share", "evenness", "said"),
    [(0.0, 1.0, "between 0 and 1, not 0"), (1.0, 1.0, "not 1"), (0.5, 0.0, "positive, not 0")],
)
def test_impossible_experts_are_refused(share: float, evenness: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ExpertLayers(0.03, evenness, share, REST)
