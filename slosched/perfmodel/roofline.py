"""The layers outside attention as a roofline: weights are read once, or tokens are multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from slosched.perfmodel.attention.smooth import smooth_max
from slosched.perfmodel.columns import Array
from slosched.perfmodel.linear import TILE_TOKENS
from slosched.perfmodel.solve import Parameter


@dataclass(frozen=True)
class RooflineLayers:
    """constant + smooth maximum of (reading the weights, arithmetic for T tokens in tiles of 64).

    A step of few tokens takes as long as reading the weights from memory, however few they are. A
    step of many tokens takes as long as its arithmetic.  The linear formula adds the two, which is
    wrong by up to half at the knee.
    """

    kind: ClassVar[str] = "roofline"
    constant_s: float
    weights_s: float
    per_token_s: float
    per_tile_s: float
    power: float

    def at(self, num_tokens: Array) -> Array:
        arithmetic_s = self.per_token_s * num_tokens + self.per_tile_s * np.ceil(
            num_tokens / TILE_TOKENS
        )
        read_s = np.full_like(arithmetic_s, self.weights_s)
        return self.constant_s + smooth_max(read_s, arithmetic_s, self.power)


def roofline_parameters(fastest_s: float, per_token_s: float) -> tuple[Parameter, ...]:
    """Return the parameters of the roofline, with starts and ranges for a fit.

    They are set in proportion to the fastest step's time and the largest step's time per token.
    """
    return (
        Parameter("constant_s", 0.1 * fastest_s, 1e-4 * fastest_s, 2 * fastest_s),
        Parameter("weights_s", 0.8 * fastest_s, 1e-3 * fastest_s, 10 * fastest_s),
        Parameter("per_token_s", 0.8 * per_token_s, 1e-3 * per_token_s, 10 * per_token_s),
        Parameter("per_tile_s", 6 * per_token_s, 1e-3 * per_token_s, 640 * per_token_s),
        Parameter("power", 4, 1, 16),
    )
