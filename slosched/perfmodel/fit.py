"""Fit a latency model of a chosen form, or of the best one, and say how wrong it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slosched.perfmodel.columns import Array
from slosched.perfmodel.errors import ErrorReport, FitError, by_regime, predictions, report_errors
from slosched.perfmodel.fit_layered import (
    FormUnfitError,
    fit_profiled_joint,
    fit_profiled_separate,
    fit_roofline,
)
from slosched.perfmodel.fit_linear import fit_linear
from slosched.perfmodel.forms import described
from slosched.perfmodel.linear import AttentionWork
from slosched.perfmodel.measurement import Measurement, Part, Profile
from slosched.perfmodel.model import FittedModel
from slosched.perfmodel.solve import Estimate
from slosched.perfmodel.split import covering, folds, on_grid
from slosched.spelling import meant

AUTO = "auto"

_MIN_STEPS = 16
_MAX_FOLDED = 400
"""Steps up to which every one is fitted and, in another fold, judged."""
_MAX_FITTED = 320
"""Of more steps than that, as many as cover the shapes are fitted and all others judged."""
_MIN_OFF_GRID = 20
_TIE = 1.05
"""A more elaborate form must beat a simpler one by more than this factor."""

Fitted = tuple[FittedModel, tuple[Estimate, ...]]
Fitter = Callable[[Sequence[Measurement], Mapping[str, str], int], Fitted]


def _linear(rows: Sequence[Measurement], work: AttentionWork) -> Fitted:
    return fit_linear([m for m in rows if m.part is Part.STEP], work)


FITTERS: Mapping[str, Fitter] = {
    "linear-literal": lambda rows, _facts, _seed: _linear(rows, AttentionWork.LITERAL),
    "linear": lambda rows, _facts, _seed: _linear(rows, AttentionWork.EXACT),
    "roofline": lambda rows, _facts, seed: fit_roofline(rows, seed),
    "profiled-separate": lambda rows, _facts, seed: fit_profiled_separate(rows, seed),
    "profiled-joint": fit_profiled_joint,
}
"""Every form that can be asked in a scheduler, the simplest first."""


@dataclass(frozen=True)
class FitReport:
    """A model and its errors; `held_out` is of predictions by a fit that never saw the step."""

    model: FittedModel
    estimates: tuple[Estimate, ...]
    train: ErrorReport
    held_out: ErrorReport
    by_regime: Mapping[str, ErrorReport]
    """Held-out errors of each kind of step."""
    off_grid: ErrorReport | None
    """Fitted on batches of powers of two only, judged on all others; None if either is few."""
    held_out_measurements: tuple[Measurement, ...]
    held_out_predictions_s: tuple[float, ...]
    considered: Mapping[str, ErrorReport | str]
    """By form, the held-out error by which it was chosen, or why it could not be fitted."""

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Parameters that the measurements say next to nothing about."""
        return tuple(e.name for e in self.estimates if not e.is_determined)


def fit(profile: Profile, form: str = AUTO, *, num_folds: int = 5, seed: int = 0) -> FitReport:
    """Fit `form`, or the one with the least held-out error for `"auto"`.

    Rows of one batch count as one step (`Profile.merged`).  Up to 400 steps: k-fold, each step
    judged by a fit without it, then one fit to all.  More: as many as cover the shapes are fitted,
    all others judge the model that is returned.  Raises FitError if the profile cannot determine
    a model.
    """
    if form != AUTO and form not in FITTERS:
        known = (AUTO, *FITTERS)
        raise FitError(f"no form {form!r}{meant(form, known)}; there are {', '.join(known)}")
    profile = profile.merged()
    steps = _check(profile)
    judged: dict[str, _Judged] = {}
    considered: dict[str, ErrorReport | str] = {}
    for name in FITTERS if form == AUTO else (form,):
        try:
            judged[name] = _judge(profile, steps, FITTERS[name], num_folds, seed)
            considered[name] = judged[name].report
        except FormUnfitError as error:
            if form != AUTO:
                raise
            considered[name] = str(error)
    chosen = _best(judged)
    return _report(profile, judged[chosen], FITTERS[chosen], considered, seed)


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
    profile: Profile, steps: list[Measurement], fitter: Fitter, num_folds: int, seed: int
) -> _Judged:
    layers = [m for m in profile.measurements if m.part is Part.LAYERS]
    if len(steps) > _MAX_FOLDED:
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
    """The form with the least mean error; of nearly equal ones the simplest."""
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
        model=described(model, profile.provenance, summary),
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
    """What becomes of shapes between and beyond those that were fitted."""
    steps = [m for m in profile.measurements if m.part is Part.STEP]
    layers = [m for m in profile.measurements if m.part is Part.LAYERS]
    grid = [m for m in steps if on_grid(m)]
    off = [m for m in steps if not on_grid(m)]
    if len(grid) < _MIN_OFF_GRID or len(off) < _MIN_OFF_GRID or not _has_both(grid):
        return None
    train = [grid[i] for i in covering(grid, _MAX_FITTED, seed)]
    model, _ = fitter([*layers, *train], profile.provenance, seed)
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
