"""The fit of a latency model of a chosen form, or of the best one, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slosched.perfmodel.columns import Array
from slosched.perfmodel.errors import ErrorReport, FitError, by_regime, predictions, report_errors
from slosched.perfmodel.fit_boosting import fit_boosting
from slosched.perfmodel.fit_joint import fit_experts_joint, fit_profiled_joint
from slosched.perfmodel.fit_layered import (
    FormUnfitError,
    fit_experts_separate,
    fit_profiled_separate,
    fit_roofline,
)
from slosched.perfmodel.fit_linear import fit_linear
from slosched.perfmodel.forms import described
from slosched.perfmodel.linear import AttentionWork
from slosched.perfmodel.measurement import Measurement, Part, Profile
from slosched.perfmodel.model import FittedModel
from slosched.perfmodel.profiled_range import with_range
from slosched.perfmodel.scatter import scatter
from slosched.perfmodel.solve import Estimate
from slosched.perfmodel.split import covering, folds, on_grid
from slosched.perfmodel.swap import with_derived_swap
from slosched.spelling import meant

AUTO = "auto"

_MIN_STEPS = 16
_MAX_FOLDED = 400
"""Largest number of steps that are judged by k-fold cross-validation."""
_MAX_FITTED = 320
"""Steps that are fitted where there are more than `_MAX_FOLDED`; all others judge the fit."""
_MIN_OFF_GRID = 20
_TIE = 1.05
"""A simpler form is still chosen if its error is at most this factor times the least one."""

Fitted = tuple[FittedModel, tuple[Estimate, ...]]
Fitter = Callable[[Sequence[Measurement], Mapping[str, str], int], Fitted]


def _linear(rows: Sequence[Measurement], work: AttentionWork) -> Fitted:
    return fit_linear([m for m in rows if m.part is Part.STEP], work)


FITTERS: Mapping[str, Fitter] = {
    "linear-literal": lambda rows, _facts, _seed: _linear(rows, AttentionWork.LITERAL),
    "linear": lambda rows, _facts, _seed: _linear(rows, AttentionWork.EXACT),
    "roofline": fit_roofline,
    "profiled-separate": fit_profiled_separate,
    "experts-separate": fit_experts_separate,
    "profiled-joint": fit_profiled_joint,
    "experts-joint": fit_experts_joint,
}
"""The fit of every form that is fast enough for a scheduler, the simplest form first."""
LEARNT: Mapping[str, Fitter] = {"boosting": fit_boosting}
"""The fit of the forms without a formula, which are too slow for a scheduler."""


@dataclass(frozen=True)
class FitReport:
    """A fitted model and its errors; `held_out` is on steps that the predicting fit never saw."""

    model: FittedModel
    estimates: tuple[Estimate, ...]
    train: ErrorReport
    held_out: ErrorReport
    by_regime: Mapping[str, ErrorReport]
    """Held-out errors of each kind of step."""
    off_grid: ErrorReport | None
    """Errors of a fit to power-of-two batches on all others; None if there are few of either."""
    held_out_measurements: tuple[Measurement, ...]
    held_out_predictions_s: tuple[float, ...]
    considered: Mapping[str, ErrorReport | str]
    """For each form, the held-out error that decided the choice, or why it could not be fitted."""

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Return the names of the parameters that the measurements hardly determine."""
        return tuple(e.name for e in self.estimates if not e.is_determined)


def fit(profile: Profile, form: str = AUTO, *, num_folds: int = 5, seed: int = 0) -> FitReport:
    """Fit `form`, or for `"auto"` the form with the least held-out error that can schedule.

    Rows of the same batch count as one step (`Profile.merged`).  Up to 400 steps are judged by
    k-fold cross-validation, each by a fit without it, and one last fit to all makes the model.  Of
    more steps, as many as cover the shapes are fitted, and all others judge the model that is
    returned. Raises FitError if the profile cannot determine a model.
    """
    fitters = {**FITTERS, **LEARNT}
    if form != AUTO and form not in fitters:
        known = (AUTO, *fitters)
        raise FitError(f"no form {form!r}{meant(form, known)}; there are {', '.join(known)}")
    single, profile = profile, profile.merged()
    steps = _check(profile)
    judged: dict[str, _Judged] = {}
    considered: dict[str, ErrorReport | str] = {}
    compared = _compared(form)
    for name in sorted(compared, key=lambda name: name != form):  # what was asked for fails first
        try:
            judged[name] = _judge(profile, steps, name, num_folds, seed)
            considered[name] = judged[name].report
        except FormUnfitError as error:
            if name == form:
                raise
            considered[name] = str(error)
    considered = {name: considered[name] for name in compared}
    chosen = _best(judged) if form == AUTO else form
    report = _report(profile, judged[chosen], fitters[chosen], considered, seed)
    return replace(report, model=_as_served(report, single))


def _compared(form: str) -> tuple[str, ...]:
    """Return the forms to be judged: trees are compared with the formulas that they replace."""
    if form == AUTO:
        return tuple(FITTERS)
    return (*FITTERS, form) if form in LEARNT else (form,)


def _as_served(report: FitReport, single: Profile) -> FittedModel:
    """Return the model with what the profile says of its server, its range and single steps."""
    model = report.model
    return described(
        model,
        with_range(Profile(single.measurements, model.provenance)),
        model.held_out_error,
        server_time=single.server_time,
        noise=scatter(single, report.held_out_measurements, report.held_out_predictions_s),
    )


@dataclass(frozen=True)
class _Judged:
    """Predictions for steps by fits that did not see them."""

    fitted: Fitted
    train: list[Measurement]
    steps: list[Measurement]
    predicted_s: Array

    @property
    def report(self) -> ErrorReport:
        return report_errors(self.predicted_s, self.steps)


def _judge(
    profile: Profile, steps: list[Measurement], form: str, num_folds: int, seed: int
) -> _Judged:
    fitter = {**FITTERS, **LEARNT}[form]
    layers = [m for m in profile.measurements if m.part is Part.LAYERS]
    if len(steps) > _MAX_FOLDED and form not in LEARNT:  # trees need all steps there are
        chosen = set(covering(steps, _MAX_FITTED, seed))
        train = [steps[i] for i in sorted(chosen)]
        rest = [m for i, m in enumerate(steps) if i not in chosen]
        fitted = fitter([*layers, *train], profile.provenance, seed)
        return _Judged(fitted, train, rest, predictions(fitted[0], rest))
    predicted = np.zeros(len(steps))
    for part in folds(steps, num_folds, seed):
        train = [m for i, m in enumerate(steps) if i not in set(part)]
        model, _ = fitter([*layers, *train], profile.provenance, seed)
        predicted[part] = predictions(model, [steps[i] for i in part])
    fitted = fitter([*layers, *steps], profile.provenance, seed)
    return _Judged(fitted, steps, steps, predicted)


def _best(judged: Mapping[str, _Judged]) -> str:
    """Choose the form with the least mean error, or a simpler one that is nearly as good."""
    least = min(j.report.mape for j in judged.values())
    return next(name for name, j in judged.items() if j.report.mape <= _TIE * least)


def _report(
    profile: Profile,
    judged: _Judged,
    fitter: Fitter,
    considered: Mapping[str, ErrorReport | str],
    seed: int,
) -> FitReport:
    model, estimates = judged.fitted
    error = judged.report
    summary = {
        "count": error.count,
        "fitted": len(judged.train),
        "mape": error.mape,
        "p99": error.p99,
        "under_p99": error.under_p99,
    }
    return FitReport(
        model=with_derived_swap(described(model, profile.provenance, summary)),
        estimates=estimates,
        train=report_errors(predictions(model, judged.train), judged.train),
        held_out=error,
        by_regime=by_regime(judged.predicted_s, judged.steps),
        off_grid=_off_grid(profile, fitter, seed),
        held_out_measurements=tuple(judged.steps),
        held_out_predictions_s=tuple(judged.predicted_s.tolist()),
        considered=considered,
    )


def _off_grid(profile: Profile, fitter: Fitter, seed: int) -> ErrorReport | None:
    """Judge a fit to power-of-two batches on batches of other sizes, inside and outside its range.

    Returns None if there are too few batches of either kind.
    """
    steps = [m for m in profile.measurements if m.part is Part.STEP]
    layers = [m for m in profile.measurements if m.part is Part.LAYERS]
    grid = [m for m in steps if on_grid(m)]
    off = [m for m in steps if not on_grid(m)]
    if len(grid) < _MIN_OFF_GRID or len(off) < _MIN_OFF_GRID or not _has_both(grid):
        return None
    train = [grid[i] for i in covering(grid, _MAX_FITTED, seed)]
    try:
        model, _ = fitter([*layers, *train], profile.provenance, seed)
    except FormUnfitError:
        return None
    return report_errors(predictions(model, off), off)


def _check(profile: Profile) -> list[Measurement]:
    steps = [m for m in profile.measurements if m.part is Part.STEP]
    if len(steps) < _MIN_STEPS:
        raise FitError(
            f"{len(steps)} different batches are too few for a fit that is judged on steps it has "
            f"not seen; profile at least {_MIN_STEPS} batches"
        )
    if not _has_both(steps):
        missing = "a prefill chunk" if all(m.regime == "decode" for m in steps) else "decodes"
        raise FitError(
            f"no measured step has {missing}, so nothing says what {missing} would cost; "
            "profile batches of both kinds"
        )
    return steps


def _has_both(steps: Sequence[Measurement]) -> bool:
    shapes = [m.shape for m in steps]
    return any(s.num_prefills for s in shapes) and any(s.num_decodes for s in shapes)
