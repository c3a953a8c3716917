"""The tables and sentences that report how a fit turned out."""

from __future__ import annotations

from collections.abc import Mapping

from slosched.perfmodel.errors import ErrorReport
from slosched.perfmodel.fit import FitReport
from slosched.perfmodel.linear import LinearModel
from slosched.perfmodel.model import FittedModel
from slosched.perfmodel.scheduling import too_slow
from slosched.perfmodel.server_time import SERVER_TIME_ORIGIN
from slosched.perfmodel.swap import SWAP_ORIGIN

ERROR_COLUMNS = ("steps", "n", "mean", "p50", "p90", "p99", "max", "under p95", "under p99")
FORM_COLUMNS = ("form", *ERROR_COLUMNS[1:])
PARAMETER_COLUMNS = ("parameter", "value", "95 % interval")


def choice(report: FitReport) -> str:
    """Explain in a sentence or two why this form was chosen."""
    error = report.held_out
    said = f"{report.model.form}: wrong by {error.mape:.1f} % on average, {error.p99:.1f} % at p99"
    if len(report.considered) == 1:
        return said
    if not report.model.can_schedule:
        return f"{said}. It is for simulations and reports: {too_slow(report.model)}"
    return ". ".join(
        (
            f"{said}; the least held-out error of {len(form_rows(report))} forms, ties to the "
            "simplest",
            *_left_out(report.considered),
        )
    )


def _left_out(considered: Mapping[str, ErrorReport | str]) -> list[str]:
    """Name the forms that were not fitted, those with the same reason in one sentence."""
    by_reason: dict[str, list[str]] = {}
    for form, why in considered.items():
        if isinstance(why, str):
            by_reason.setdefault(why, []).append(form)
    return [
        f"{' and '.join(forms)} {'was' if len(forms) == 1 else 'were'} not fitted: {why}"
        for why, forms in by_reason.items()
    ]


def server_said(model: FittedModel) -> str:
    """Return a sentence on what a server adds to the device, and how single steps scatter."""
    said = f"the server adds {model.server_time}"
    if not model.server_time.is_none:
        said += f" ({model.provenance.get(SERVER_TIME_ORIGIN, 'measured')})"
    scatter = f"{100 * model.noise:.1f} %" if model.noise else "a share that is not known"
    return f"{said}; single steps scatter about the model by {scatter}"


def form_rows(report: FitReport) -> list[tuple[str, ...]]:
    return [
        _error_row(name, error)
        for name, error in report.considered.items()
        if isinstance(error, ErrorReport)
    ]


def parameter_rows(report: FitReport) -> list[tuple[str, str, str]]:
    """Return name, value and interval of each parameter, times in microseconds.

    For a parameter that no measurement depends on, the interval says so.
    """
    is_linear = isinstance(report.model, LinearModel)
    is_derived = SWAP_ORIGIN in report.model.provenance
    rows = []
    for i, e in enumerate(report.estimates, start=1):
        name, unit, factor = e.name, "", 1.0
        if name.endswith("_s"):
            name, unit, factor = name.removesuffix("_s"), " µs", 1e6
        name = f"C{i} {name}" if is_linear else name
        value = e.value
        low, high = (_rounded(factor * end, 3) for end in (e.low, e.high))
        interval = f"{low} to {high}{unit}"
        if not e.is_determined:
            interval = "not determined by these measurements"
        if is_derived and e.name == "per_swapped_block_s":
            value, interval = report.model.swapped_block_s, "derived from GPU and model"
        rows.append((name.replace("_", " "), f"{_rounded(factor * value, 4)}{unit}", interval))
    return rows


def _rounded(value: float, num_digits: int) -> str:
    """Return a value with so many digits, or as a whole number where it has more."""
    text = f"{value:.{num_digits}g}"
    return f"{value:,.0f}" if "e+" in text else text


def error_rows(report: FitReport) -> list[tuple[str, ...]]:
    off_grid = {"off the power-of-two grid": report.off_grid} if report.off_grid else {}
    reports = {
        "fitted": report.train,
        "held out": report.held_out,
        **{f"held out, {regime}": error for regime, error in report.by_regime.items()},
        **off_grid,
    }
    return [_error_row(name, error) for name, error in reports.items()]


def _error_row(name: str, error: ErrorReport) -> tuple[str, ...]:
    percents = (
        error.mape,
        error.p50,
        error.p90,
        error.p99,
        error.max,
        error.under_p95,
        error.under_p99,
    )
    return (name, str(error.count), *(f"{percent:.1f}" for percent in percents))
