"""The linear form says which form is better on a device that is not linear, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import make_model
from synthetic_steps import make_measurements, random_batches

from slosched.perfmodel import ErrorReport
from slosched.perfmodel.diagnosis import why_not_linear
from slosched.perfmodel.errors import evaluate

REPORT = evaluate(make_model(), make_measurements(random_batches(3), make_model()))


def errors(**mapes: float) -> dict[str, ErrorReport | str]:
    return {form.replace("_", "-"): replace(REPORT, mape=mape) for form, mape in mapes.items()}


def test_a_linear_device_needs_no_other_form() -> None:
    assert why_not_linear(errors(linear=2.0, roofline=1.95), "linear") is None


@pytest.mark.parametrize(
    ("mapes", "best", "reason"),
    [
        ({"roofline": 3.0, "profiled_separate": 3.0}, "roofline", "knee of a roofline"),
        (
            {"roofline": 19.0, "profiled_separate": 3.0, "experts_separate": 1.0},
            "experts-separate",
            "mixture of experts",
        ),
        (
            {"roofline": 19.5, "profiled_separate": 10.0, "profiled_joint": 1.2},
            "profiled-joint",
            "joint attention",
        ),
    ],
)
def test_the_better_form_is_named_with_both_figures_and_the_reason(
    mapes: dict[str, float], best: str, reason: str
) -> None:
    said = why_not_linear(errors(linear=20.0, **mapes), "linear")
    assert said is not None
    assert f"{best} errs by {min(mapes.values()):.1f} %" in said
    assert "linear by 20.0 %" in said
    found = [r for r in ("knee of a roofline", "mixture of", "joint attention") if r in said]
    assert found == [reason.replace("mixture of experts", "mixture of")]


def test_forms_that_were_not_fitted_explain_nothing() -> None:
    considered = {**errors(linear=20.0, roofline=19.5), "profiled-joint": "no facts"}
    assert why_not_linear(considered, "linear") is None
