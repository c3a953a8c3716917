"""The linear form says which form is better on a device that is not linear, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_model
from synthetic_steps import make_measurements, random_batches

from slosched.perfmodel import ErrorReport, Profile, read_profile
from slosched.perfmodel.diagnosis import why_not_linear, why_not_seconds
from slosched.perfmodel.errors import evaluate

FOUND = sorted((Path(__file__).parents[2] / "profiling").rglob("*.csv"))
PROFILES = [path for path in FOUND if "batch,num_swapped" in path.read_text(encoding="utf-8")]
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


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_measured_times_are_seconds_and_a_thousand_times_as_much_is_not(path: Path) -> None:
    """The profiles are of nine GPUs and of a CPU."""
    profile = read_profile(path)
    assert why_not_seconds(profile) is None
    said = why_not_seconds(in_milliseconds(profile))
    assert said is not None
    assert "milliseconds" in said


def test_the_fastest_small_step_is_named() -> None:
    steps = make_measurements([((1, 300),) * 8, ((512, 0),), ((40, 0),)], make_model())
    slow = [replace(m, seconds=s) for m, s in zip(steps, (12.5, 0.9, 30.0), strict=True)]
    said = why_not_seconds(Profile(tuple(slow)))
    assert said is not None
    assert said.startswith("no step of at most 64 tokens took less than 12.5 s (1@300x8).")


def test_slow_steps_of_long_prompts_are_no_reason_to_doubt() -> None:
    (step,) = make_measurements([((8192, 0),)], make_model())
    assert why_not_seconds(Profile((replace(step, seconds=30.0),))) is None


def in_milliseconds(profile: Profile) -> Profile:
    return Profile(tuple(replace(m, seconds=1000 * m.seconds) for m in profile.measurements))
