"""Each form is recovered from the times of a device of that form, with and without layer times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from factories import make_model
from synthetic_steps import make_measurements, random_batches
from test_layered import EXPERTS, FORMS, JOINT, REQUESTS, SEPARATE, TABLE

from slosched.perfmodel import (
    FITTERS,
    FitError,
    FittedModel,
    LayeredModel,
    Measurement,
    Part,
    Profile,
    fit,
)
from slosched.perfmodel.errors import ErrorReport, evaluate
from slosched.perfmodel.experts import ExpertLayers
from slosched.perfmodel.split import folds
from slosched.perfmodel.table import Table

NOISE = 0.02
NOISE_P50, NOISE_P90 = 67.4 * NOISE, 164.5 * NOISE
"""Quantiles of the absolute value of normal noise, in percent."""
FACTS = {"num_sms": "128", "num_query_heads": "32", "num_kv_heads": "8"}
EXPERT_FACTS = {**FACTS, "num_experts": "128", "num_experts_per_token": "8"}
STAIRS = Table((1, 64, 96, 256, 384, 2048), (0.010, 0.0102, 0.018, 0.0185, 0.035, 0.11))
"""Layer times with jumps, as of GEMM kernels that change at some sizes; no roofline fits them."""
SEPARATE_TRUTH = LayeredModel(TABLE, REQUESTS, SEPARATE, per_swapped_block_s=2e-5)
JOINT_TRUTH = LayeredModel(TABLE, REQUESTS, JOINT)
EXPERTS_TRUTH = LayeredModel(EXPERTS, REQUESTS, SEPARATE)
EXPERTS_JOINT_TRUTH = LayeredModel(EXPERTS, REQUESTS, JOINT)


def layers_rows(model: LayeredModel) -> list[Measurement]:
    """Return what a profiler of single operators measures.

    Those are the layers at T tokens of one request, and at N requests of one token each.
    """
    tokens = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 1536, 2048]
    requests = [2, 8, 32, 64, 128, 256]
    alone_s = model.layers.at(np.array(tokens, dtype=float))
    many_s = model.layers.at(np.array(requests, dtype=float))
    many_s = many_s + model.requests.at(np.array(requests, dtype=float))
    return [
        *(
            Measurement(((t, 0),), float(s), part=Part.LAYERS)
            for t, s in zip(tokens, alone_s, strict=True)
        ),
        *(
            Measurement(((1, 0),) * n, float(s), part=Part.LAYERS)
            for n, s in zip(requests, many_s, strict=True)
        ),
    ]


def profile_of(
    truth: FittedModel,
    count: int = 120,
    noise: float = NOISE,
    rows: Sequence[Measurement] = (),
    swapped_blocks: Sequence[int] = (0,),
    facts: dict[str, str] = FACTS,
) -> Profile:
    # One chunk a step, as profilers do, since chunks in a joint kernel hide each other's times.
    batches = random_batches(count, max_prefills=1)
    steps = make_measurements(batches, truth, noise, swapped_blocks)
    return Profile((*rows, *steps), facts)


def fresh(truth: FittedModel) -> tuple[Measurement, ...]:
    return make_measurements(random_batches(200, seed=9, max_prefills=1), truth)


@pytest.mark.parametrize(
    ("form", "truth", "with_layers", "allowed"),
    [
        ("linear", make_model(), False, 1.0),
        ("roofline", FORMS["roofline"], False, 1.5),
        pytest.param("profiled-separate", SEPARATE_TRUTH, False, 1.5, marks=pytest.mark.slow),
        ("profiled-separate", SEPARATE_TRUTH, True, 1.0),
        ("experts-separate", EXPERTS_TRUTH, False, 1.5),
        pytest.param("profiled-joint", JOINT_TRUTH, False, 2.0, marks=pytest.mark.slow),
        ("profiled-joint", JOINT_TRUTH, True, 1.0),
        ("experts-joint", EXPERTS_JOINT_TRUTH, False, 2.0),
    ],
)
def test_a_form_is_recovered_from_noisy_times_of_a_device_of_that_form(
    form: str, truth: FittedModel, with_layers: bool, allowed: float
) -> None:
    """Held-out errors are as large as the noise; on new batches without noise they are small.

    `allowed` is the largest mean error on those new batches, in percent.  Held-out errors are
    judged by quantiles: half of the steps may not reach down to the smallest of the other half, and
    how far a fit is off beyond its steps differs with the processor's arithmetic.
    """
    rows = layers_rows(truth) if with_layers and isinstance(truth, LayeredModel) else ()
    report = fit(profile_of(truth, rows=rows, facts=EXPERT_FACTS), form, num_folds=2)
    assert report.model.form == form
    assert report.held_out.count == 120, "layers are fitted, but no steps to be judged on"
    assert report.held_out.p50 < NOISE_P50 * 1.15 + allowed / 2
    assert report.held_out.p90 < NOISE_P90 * 1.15 + allowed / 2
    assert evaluate(report.model, fresh(truth)).mape < allowed


def test_the_rows_of_layers_may_come_in_any_order_and_more_than_once() -> None:
    rows = layers_rows(SEPARATE_TRUTH)
    as_written, mixed_up = (
        fit(profile_of(SEPARATE_TRUTH, rows=order), "profiled-separate", num_folds=2).model
        for order in (rows, [*rows[::-1], Measurement(((2, 0),) * 8, 0.5e-3, part=Part.LAYERS)])
    )
    assert mixed_up.parameters()["requests"] == as_written.parameters()["requests"]
    assert mixed_up.parameters()["layers"] == as_written.parameters()["layers"]


def test_without_noise_separate_attention_is_found_to_the_parameter() -> None:
    report = fit(
        profile_of(SEPARATE_TRUTH, noise=0.0, rows=layers_rows(SEPARATE_TRUTH)), "profiled-separate"
    )
    found = {e.name: e.value for e in report.estimates if e.is_determined}
    for part, kernel in (("decode", SEPARATE.decode), ("prefill", SEPARATE.prefill)):
        for name, value in vars(kernel).items():
            if f"{part}: {name}" in found and name != "per_longest_context_token_s":
                assert found[f"{part}: {name}"] == pytest.approx(value, rel=0.05), (part, name)
    assert {"decode: per_context_token_s", "prefill: per_pair_s"} <= set(found)


@pytest.mark.parametrize("form", ["roofline", "profiled-separate", "profiled-joint"])
def test_the_time_of_a_copied_block_is_found(form: str) -> None:
    model = FORMS[form]
    assert isinstance(model, LayeredModel)
    truth = LayeredModel(model.layers, model.requests, model.attention, per_swapped_block_s=3e-5)
    rows = layers_rows(truth)
    report = fit(
        profile_of(truth, rows=rows, noise=0.005, swapped_blocks=(0, 0, 0, 0, 60)),
        form,
        num_folds=2,
    )
    swap = next(e for e in report.estimates if e.name == "per_swapped_block_s")
    assert swap.value == pytest.approx(3e-5, rel=0.15)
    assert 0 < swap.low < swap.value < swap.high
    assert "per_swapped_block_s" not in report.undetermined
    assert report.by_regime["swap"].mape < 2


@pytest.mark.parametrize(
    "form",
    [
        "linear",
        "profiled-separate",
        *(pytest.param(form, marks=pytest.mark.slow) for form in ("roofline", "profiled-joint")),
    ],
)
def test_without_copies_their_time_is_reported_as_undetermined(form: str) -> None:
    rows = layers_rows(JOINT_TRUTH)
    report = fit(profile_of(JOINT_TRUTH, count=60, rows=rows), form, num_folds=2)
    assert "per_swapped_block_s" in report.undetermined
    copies = Measurement((), 1.0, num_swapped_blocks=10).shape
    none = Measurement((), 1.0, num_swapped_blocks=1).shape
    assert report.model.predict(copies) == report.model.predict(none)


def test_auto_takes_the_formula_where_the_formula_is_right() -> None:
    """Every form can follow a linear device; among nearly equal forms the simplest is chosen."""
    report = fit(profile_of(make_model(), count=90), num_folds=2)
    assert report.model.form == "linear"
    assert set(report.considered) == set(FITTERS)


@pytest.mark.parametrize(
    ("truth", "form"),
    [
        (LayeredModel(STAIRS, REQUESTS, SEPARATE), "profiled-separate"),
        (JOINT_TRUTH, "profiled-joint"),
    ],
)
def test_auto_takes_the_layered_form_that_the_device_has(truth: LayeredModel, form: str) -> None:
    report = fit(profile_of(truth, rows=layers_rows(truth)), num_folds=2)
    assert report.model.form == form
    errors = {n: e.mape for n, e in report.considered.items() if isinstance(e, ErrorReport)}
    assert errors[form] < 0.7 * errors["linear"]
    assert errors[form] <= 1.05 * min(errors.values())


def test_steps_alone_show_which_experts_are_read() -> None:
    """A mixture of eight experts touches all within a few tokens, between a table's knots."""
    few = ExpertLayers(0.03, 50.0, 2 / 8, Table((1, 64, 2048), (0.003, 0.004, 0.06)))
    truth = LayeredModel(few, REQUESTS, SEPARATE)
    batches = [*random_batches(90), *(((1, 64 * n),) * n for n in (1, 2, 4, 12, 16))]
    steps = make_measurements(batches, truth, NOISE)
    judged = make_measurements([((1, 900),) * n for n in range(1, 16)], truth)
    facts = {"num_experts": "8", "num_experts_per_token": "2"}
    errors = {
        form: evaluate(FITTERS[form](steps, facts, 0)[0], judged).max
        for form in ("linear", "roofline", "profiled-separate", "experts-separate")
    }
    assert errors["experts-separate"] < 5
    assert min(errors["linear"], errors["roofline"]) > 25
    assert errors["profiled-separate"] > 2 * errors["experts-separate"]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "depends on num_experts_per_token, which the provenance does not say"),
        ({"num_experts_per_token": "8"}, "depends on num_experts, which the provenance does not"),
        ({"num_experts_per_token": "8", "num_experts": "8"}, "8 of 8 for each token"),
        ({"num_experts_per_token": "top", "num_experts": "8"}, "'top' in the provenance is not a"),
    ],
)
def test_experts_are_not_guessed(facts: dict[str, str], said: str) -> None:
    with pytest.raises(FitError, match=said):
        fit(profile_of(make_model(), count=60, facts=facts), "experts-separate")


def test_without_facts_about_the_gpu_a_joint_kernel_is_skipped_and_refused_by_name() -> None:
    facts = {name: value for name, value in FACTS.items() if name != "num_sms"}
    profile = profile_of(make_model(), count=60, facts=facts)
    report = fit(profile, num_folds=2)
    assert report.model.form == "linear"
    reason = report.considered["profiled-joint"]
    assert isinstance(reason, str)
    assert "num_sms" in reason
    with pytest.raises(FitError, match="waves depend on num_sms, which the provenance does not"):
        fit(profile, "profiled-joint")


@pytest.mark.parametrize(
    ("kept", "missing"),
    [(("mixed",), "decode"), (("mixed", "prefill"), "decode"), (("mixed", "decode"), "prefill")],
)
def test_a_joint_kernel_is_not_guessed_from_mixed_steps_alone(
    kept: tuple[str, ...], missing: str
) -> None:
    whole = profile_of(JOINT_TRUTH, count=90)
    steps = tuple(m for m in whole.measurements if m.regime in kept)
    with pytest.raises(FitError, match=f"at least 4 steps of {missing} alone, and 0 are there"):
        fit(Profile(steps, FACTS), "profiled-joint")


def test_steps_of_copies_alone_are_fitted_too() -> None:
    copies = tuple(
        Measurement((), 0.002 + 3e-5 * blocks, num_swapped_blocks=blocks)
        for blocks in (100, 200, 400, 800, 1600)
    )
    steps = profile_of(SEPARATE_TRUTH, count=60, noise=0.0).measurements
    report = fit(Profile((*steps, *copies)), "profiled-separate", num_folds=2)
    swap = next(e for e in report.estimates if e.name == "per_swapped_block_s")
    assert swap.value == pytest.approx(3e-5, rel=0.4)


def test_layers_rows_alone_are_no_steps() -> None:
    with pytest.raises(FitError, match="0 different batches are too few"):
        fit(Profile(tuple(layers_rows(JOINT_TRUTH))))


def test_a_fit_does_not_see_the_step_that_judges_it_in_any_form() -> None:
    """Spoiling the times of one fold does not change the predictions for it."""
    profile = profile_of(SEPARATE_TRUTH, count=48)
    steps = list(profile.measurements)
    clean = fit(profile, "profiled-separate", num_folds=2)
    fold = folds(steps, 2, seed=0)[0]
    for i in fold:
        steps[i] = replace(steps[i], seconds=5 * steps[i].seconds)
    spoilt = fit(Profile(tuple(steps), FACTS), "profiled-separate", num_folds=2)
    pairs = list(zip(spoilt.held_out_predictions_s, clean.held_out_predictions_s, strict=True))
    assert all(pairs[i][0] == pairs[i][1] for i in fold)
    assert sum(a != b for a, b in pairs) == 48 - len(fold)
