"""Smooth maxima: two things that overlap take as long as the slower, or a little more."""

from __future__ import annotations

from math import sqrt

import numpy as np

from slosched.perfmodel.columns import Array

ROOFLINE_POWER = 4.0
"""Sharpness of a roofline's knee where no data determine it."""


def smooth_max(a: Array, b: Array, power: float) -> Array:
    """Return (aᵖ + bᵖ)^(1/p) of two positive arrays.

    It is their sum at p = 1 and approaches their maximum as p grows.
    """
    high, low = np.maximum(a, b), np.minimum(a, b)
    ratio = np.divide(low, high, out=np.zeros_like(high), where=high > 0)
    return np.asarray(high * (1 + ratio**power) ** (1 / power))


def smooth_max_of_two(a: float, b: float) -> float:
    """Return the smooth maximum of power `ROOFLINE_POWER`.

    It needs roots only, which are the same to the bit on every machine; powers are not.
    """
    if a < b:
        a, b = b, a
    if b <= 0:
        return a
    ratio = b / a
    ratio *= ratio
    return a * sqrt(sqrt(1 + ratio * ratio))


TWO_THIRDS = ((1.2339255848424673, 0.2904058009858591), (0.5672878971034621, 0.022942243812617596))
"""The coefficients of x and x² in `one_plus_to_two_thirds`: numerator, then denominator."""


def one_plus_to_two_thirds(x: float) -> float:
    """Return (1 + x)^(2/3) for x in [0, 1], with a relative error of 7e-7 at most.

    The result is the same to the bit on every machine. It is a rational function fitted by weighted
    least squares, exact at 0.
    """
    (a, b), (c, d) = TWO_THIRDS
    return (1 + x * (a + x * b)) / (1 + x * (c + x * d))
