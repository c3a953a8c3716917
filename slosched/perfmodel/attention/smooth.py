"""Smooth maxima: two things that overlap take as long as the slower, or a little more."""

from __future__ import annotations

import numpy as np

from slosched.perfmodel.columns import Array

ROOFLINE_POWER = 4.0
"""Sharpness of the rooflines whose sharpness no data can tell."""


def smooth_max(a: Array, b: Array, power: float) -> Array:
    """(aᵖ + bᵖ)^(1/p) of two positive arrays: their sum at p = 1, their maximum as p grows."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    ratio = np.divide(low, high, out=np.zeros_like(high), where=high > 0)
    return np.asarray(high * (1 + ratio**power) ** (1 / power))


def smooth_max_of_two(a: float, b: float, power: float) -> float:
    if a < b:
        a, b = b, a
    return a * (1 + (b / a) ** power) ** (1 / power) if b > 0 else a
