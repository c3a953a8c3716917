"""What a profile and the errors of its fits say: a wrong unit of time, or why it is not linear."""

from __future__ import annotations

from collections.abc import Mapping

from slosched.perfmodel.errors import ErrorReport
from slosched.perfmodel.measurement import Profile, format_chunks

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
_SMALL_TOKENS = 64
_SLOW_S = 1.0
"""Longer than the fastest small step of any profile here by twelve times (a CPU) to a thousand (a
B200); in milliseconds, times of small steps are longer than that."""


def why_not_seconds(profile: Profile) -> str | None:
    """Say which step makes it unlikely that the times of a profile are seconds; None if none does.

    It is the fastest of those that compute few tokens.
    """
    small = [m for m in profile.measurements if 0 < m.shape.num_tokens <= _SMALL_TOKENS]
    fastest = min(small, key=lambda m: m.seconds, default=None)
    if fastest is None or fastest.seconds <= _SLOW_S:
        return None
    return (
        f"no step of at most {_SMALL_TOKENS} tokens took less than {fastest.seconds:.4g} s "
        f"({format_chunks(fastest.chunks)}). Are these milliseconds? The column `seconds` has to "
        "hold seconds: 0.0125, not 12.5"
    )


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
