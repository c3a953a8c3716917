"""Checks of a policy's options; a policy calls them in `__post_init__`."""

from __future__ import annotations

import math


def check_at_least(least: float, **options: float) -> None:
    """Raise ValueError for an option that is below `least`, or not a number."""
    for name, value in options.items():
        if not value >= least:
            raise ValueError(f"{name} must be at least {least}, not {value}")


def check_positive(**options: float) -> None:
    """Raise ValueError for an option that is not a positive, finite number."""
    for name, value in options.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, not {value}")


def check_share(**options: float) -> None:
    """Raise ValueError for an option, such as a margin, that is not in [0, 1)."""
    for name, value in options.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), not {value}")


def check_positive_share(**options: float) -> None:
    """Raise ValueError for an option, such as a quantile, that is not in (0, 1]."""
    for name, value in options.items():
        if not 0 < value <= 1:
            raise ValueError(f"{name} must be in (0, 1], not {value}")


def check_part(**options: float) -> None:
    """Raise ValueError for an option that is not in [0, 1]."""
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], not {value}")
