"""Why a device is not linear, as far as the errors of the other forms tell."""

from __future__ import annotations

from collections.abc import Mapping

from slosched.perfmodel.errors import ErrorReport

_CLEAR = 0.9
"""A form explains a device only if its error is below this share of the simpler form's error."""
_REASONS = (
    (
        "experts-separate",
        "roofline",
        "a step of few tokens reads the weights of few experts (a mixture of experts)",
    ),
    (
        "roofline",
        "linear",
        "reading the weights and computing overlap, so that a step takes the longer of the two, "
        "not their sum (the knee of a roofline)",
    ),
    (
        "profiled-joint",
        "profiled-separate",
        "one attention kernel computes chunks and decodes together, and its time is not the sum "
        "of theirs (joint attention)",
    ),
)
"""A form, the simpler form that lacks one idea of it, and that idea."""


def why_not_linear(considered: Mapping[str, ErrorReport | str], linear: str) -> str | None:
    """Say which form errs less than the form `linear`, by how much and for which reasons.

    `considered` has the held-out errors of all forms on the same steps. Returns None if the linear
    form is about as good as the best one.
    """
    errors = {form: e.mape for form, e in considered.items() if isinstance(e, ErrorReport)}
    best = min(errors, key=lambda form: errors[form])
    if errors[best] >= _CLEAR * errors[linear]:
        return None
    reasons = [
        reason
        for form, simpler, reason in _REASONS
        if form in errors and simpler in errors and errors[form] < _CLEAR * errors[simpler]
    ]
    said = (
        f"The device is not {linear}: {best} errs by {errors[best]:.1f} % on the same held-out "
        f"steps on average, {linear} by {errors[linear]:.1f} %"
    )
    return f"{said}. What the errors of the forms tell: {'; '.join(reasons)}." if reasons else said
