"""Trees without a formula are right where they were fitted, and wrong for larger shapes."""

from __future__ import annotations

import pytest
from factories import make_model
from synthetic_steps import make_measurements, random_batches

from benchmarks.trees import REFERENCES, fit_trees
from slosched.perfmodel.errors import report_errors

TRUTH = make_model()
STEPS = make_measurements(random_batches(600), TRUTH)


@pytest.mark.parametrize("name", REFERENCES)
def test_trees_collapse_on_shapes_beyond_those_that_were_fitted(name: str) -> None:
    """The trees see up to 2,000 tokens; beyond, their predictions stop growing."""
    model = fit_trees(name, STEPS)
    near = make_measurements(random_batches(150, seed=8), TRUTH)
    assert report_errors(model.predict_many(near), near).mape < 10
    far = make_measurements([((n, 0),) for n in (20_000, 40_000)], TRUTH)
    assert report_errors(model.predict_many(far), far).under_p95 > 50
    assert model.predict(near[0].shape) == pytest.approx(model.predict_many(near[:1])[0])


def test_an_unknown_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="no reference 'bush'; there are forest, boosting"):
        fit_trees("bush", STEPS)
