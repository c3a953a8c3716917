"""The layers of a mixture of experts: a step reads the weights of the experts it touches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from slosched.perfmodel.columns import Array
from slosched.perfmodel.table import Table


@dataclass(frozen=True)
class ExpertLayers:
    """experts_s · (share of the experts that T tokens touch) + a table of all the rest over T.

    If every expert is equally popular, T tokens touch the share 1 - (1 - share_per_token)^T of all
    experts.  Routers have favourites, so that popularity is taken to follow a gamma distribution,
    whose shape is `evenness`: the share is then 1 - (1 + T·r / evenness)^(-evenness), with
    r = -log(1 - share_per_token).  It approaches the first formula as `evenness` grows.
    """

    kind: ClassVar[str] = "experts"
    experts_s: float
    """Time to read the weights of all experts."""
    evenness: float
    share_per_token: float
    """Experts that compute one token, as a share of all experts of a layer."""
    rest: Table

    def __post_init__(self) -> None:
        if not 0 < self.share_per_token < 1:
            raise ValueError(
                "the share of the experts that compute a token must lie between 0 and 1, not "
                f"{self.share_per_token}"
            )
        if self.evenness <= 0:
            raise ValueError(f"the evenness of experts must be positive, not {self.evenness}")

    def at(self, counts: Array) -> Array:
        touched = touched_share(counts, self.share_per_token, self.evenness)
        return np.asarray(self.experts_s * touched + self.rest.at(counts))


def touched_share(num_tokens: Array, share_per_token: float, evenness: float | Array) -> Array:
    """Return the expected share of the experts that compute at least one of the tokens."""
    tokens_per_expert = -np.log1p(-share_per_token) * num_tokens
    return np.asarray(-np.expm1(-evenness * np.log1p(tokens_per_expert / evenness)))
