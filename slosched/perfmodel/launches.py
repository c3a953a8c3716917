"""What the host takes to launch a step's kernels one by one, where no CUDA graph launches them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slosched.core import BatchShape
from slosched.perfmodel.columns import Array, Columns
from slosched.perfmodel.graphs import StepGraphs
from slosched.perfmodel.solve import Parameter


@dataclass(frozen=True)
class Launches:
    """The least time of layers and attention in a step that runs without a CUDA graph.

    The GPU computes while the host launches, so such a step takes the longer of the two.
    """

    launch_s: float
    most_tokens: int
    """Steps of any kind have a graph up to so many tokens."""
    most_decodes: int
    """Steps of decodes alone have one up to so many decodes."""

    def asked(
        self, predict: Callable[[BatchShape], float], other_s: Callable[[BatchShape], float]
    ) -> Callable[[BatchShape], float]:
        """Return a function that predicts as `predict` does, and waits for the launches.

        `other_s` tells what a step takes outside layers and attention.
        """
        launch_s, most_tokens, most_decodes = self.launch_s, self.most_tokens, self.most_decodes

        def predict_launched(shape: BatchShape) -> float:
            seconds = predict(shape)
            others = shape.num_prefill_tokens + shape.num_draft_tokens
            num_decodes = shape.num_decodes
            if others + num_decodes <= most_tokens or (not others and num_decodes <= most_decodes):
                return seconds
            least_s = launch_s + other_s(shape)
            return least_s if least_s > seconds else seconds

        return predict_launched

    def at_least(self, seconds: Array, c: Columns, other_s: Array) -> Array:
        """Return the seconds of many shapes that would take `seconds` if launches took no time."""
        without = without_graph(c, self.most_tokens, self.most_decodes)
        return np.where(without, np.maximum(seconds, self.launch_s + other_s), seconds)


class FreeLaunches:
    """The time of the launches as a free parameter, if there are steps that show it."""

    def __init__(self, graphs: StepGraphs, c: Columns, seconds: Array) -> None:
        self._most_tokens, self._most_decodes = graphs.most_tokens, graphs.most_decodes
        self._without = without_graph(c, self._most_tokens, self._most_decodes)
        self.parameters: tuple[Parameter, ...] = ()
        if graphs.sizes and self._without.any():
            # The fastest step without a graph is the longest that launches can surely take.
            start_s = float(seconds[self._without].min())
            self.parameters = (Parameter("launch_s", start_s, 0.01 * start_s, 10 * start_s),)

    def at_least(self, device_s: Array, guesses: Array) -> Array:
        """Return the seconds of layers and attention, for guesses as `solve` makes them."""
        if not self.parameters:
            return device_s
        [launch_s] = guesses
        return np.where(self._without, np.maximum(device_s, launch_s), device_s)

    def build(self, values: Array) -> Launches | None:
        if not self.parameters:
            return None
        [launch_s] = values.tolist()
        return Launches(launch_s, self._most_tokens, self._most_decodes)


def without_graph(c: Columns, most_tokens: int, most_decodes: int) -> Array:
    """Tell of each shape whether it runs without a CUDA graph."""
    is_decodes = c.num_tokens == c.num_decodes
    has_graph = (c.num_tokens <= most_tokens) | (is_decodes & (c.num_decodes <= most_decodes))
    return np.asarray(~has_graph)
