"""Smooth maxima: two things that overlap take as long as the slower, or a little more."""

from __future__ import annotations

from math import sqrt

import numpy as np

from slosched.perfmodel.columns import Array

ROOFLINE_POWER = 4.0
"""Sharpness of the rooflines whose sharpness no data can tell."""


def smooth_max(a: Array, b: Array, power: float) -> Array:
    """(aᵖ + bᵖ)^(1/p) of two positive arrays: their sum at p = 1, their maximum as p grows."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    ratio = np.divide(low, high, out=np.zeros_like(high), where=high > 0)
    return np.asarray(high * (1 + ratio**power) ** (1 / power))


def smooth_max_of_two(a: float, b: float) -> float:
    """Of power `ROOFLINE_POWER`: roots are the same to the bit on every machine, powers not."""
    if a < b:
        a, b = b, a
    if b <= 0:
        return a
    ratio = b / a
    ratio *= ratio
    return a * sqrt(sqrt(1 + ratio * ratio))


def one_plus_to_two_thirds(x: float) -> float:
    """(1 + x)^(2/3) for x in [0, 1], to 1.2e-9 of it, and the same to the bit on every machine.

    A rational function fitted by weighted least squares; exact at 0.
    """
    above = 1 + x * (1.6879049908120254 + x * (0.7918933222926021 + x * 0.0884396323478808))
    below = 1 + x * (1.0212384246016297 + x * (0.22217613334897468 + x * 0.004434493834693278))
    return above / below
