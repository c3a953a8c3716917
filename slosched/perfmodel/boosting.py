"""The time of a step as a product of regression trees, for simulations and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slosched.core import BatchShape
from slosched.perfmodel.model import FittedModel

FEATURES = (
    "num_prefill_tokens",
    "num_prefills",
    "num_decodes",
    "prefill_attention_tokens",
    "squared_chunk_tokens",
    "prefill_context_tokens",
    "num_prefill_tiles",
    "prefill_tile_tokens",
    "decode_context_tokens",
    "max_context_tokens",
    "max_decode_context_tokens",
)
"""The sums of a shape that trees look at. Copied blocks have a time of their own."""

Tree = float | tuple[int, float, "Tree", "Tree"]
"""A factor, or (index of a feature, threshold, tree if it is at most that, tree if it is more)."""


@dataclass(frozen=True)
class Trees:
    """Seconds as a product: a baseline, times the factor that each tree finds for the shape."""

    baseline_s: float
    trees: tuple[Tree, ...]

    def seconds(self, features: Sequence[float]) -> float:
        seconds = self.baseline_s
        for tree in self.trees:
            while isinstance(tree, tuple):
                index, threshold, low, high = tree
                tree = low if features[index] <= threshold else high
            seconds *= tree
        return seconds

    def parameters(self) -> dict[str, Any]:
        return {"baseline_s": self.baseline_s, "trees": self.trees}


@dataclass(eq=False)
class BoostedModel(FittedModel):
    """Gradient-boosted trees that were fitted to many steps; too slow for a scheduler.

    The trees of `expected` give the expected time, those of `upper` the time that 99 % of the steps
    stay below. Both never fall as a sum grows. Beyond the largest steps that were fitted they stay
    constant, so that the model says nothing about larger ones.
    """

    can_schedule: ClassVar[bool] = False
    expected: Trees
    upper: Trees
    per_swapped_block_s: float = 0.0
    constant_s: float = 0.0
    """What every step that computes a token takes besides."""

    @property
    def form(self) -> str:
        return "boosting"

    @property
    def swapped_block_s(self) -> float:
        return self.per_swapped_block_s

    def predict(self, shape: BatchShape) -> float:
        return self._seconds(self.expected, shape)

    def predict_upper(self, shape: BatchShape) -> float:
        """Return the seconds that 99 % of the steps stayed below; never less than `predict`."""
        return max(self.predict(shape), self._seconds(self.upper, shape))

    def _seconds(self, trees: Trees, shape: BatchShape) -> float:
        copies_s = self.per_swapped_block_s * shape.num_swapped_blocks
        if not shape.num_tokens:
            return copies_s
        return (
            trees.seconds([getattr(shape, name) for name in FEATURES]) + self.constant_s + copies_s
        )

    def parameters(self) -> dict[str, Any]:
        return {
            "features": FEATURES,
            "expected": self.expected.parameters(),
            "upper": self.upper.parameters(),
            "per_swapped_block_s": self.per_swapped_block_s,
            "constant_s": self.constant_s,
        }


def boosted_from(parameters: Mapping[str, Any], **described: Any) -> BoostedModel:
    """Build the model that has these `BoostedModel.parameters`.

    Raises KeyError, TypeError or ValueError if they do not fit.
    """
    if tuple(parameters["features"]) != FEATURES:
        raise ValueError(f"the trees look at other sums: {parameters['features']}")
    return BoostedModel(
        _trees_from(parameters["expected"]),
        _trees_from(parameters["upper"]),
        float(parameters["per_swapped_block_s"]),
        float(parameters["constant_s"]),
        **described,
    )


def _trees_from(values: Mapping[str, Any]) -> Trees:
    return Trees(float(values["baseline_s"]), tuple(map(_tree_from, values["trees"])))


def _tree_from(value: Any) -> Tree:
    """Build a tree from the lists that JSON keeps of it."""
    if isinstance(value, list | tuple):
        index, threshold, low, high = value
        if not 0 <= index < len(FEATURES):
            raise ValueError(f"a tree has {len(FEATURES)} sums to look at, not number {index}")
        return int(index), float(threshold), _tree_from(low), _tree_from(high)
    return float(value)
