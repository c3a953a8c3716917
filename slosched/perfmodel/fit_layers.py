"""Layers that were only measured as part of whole steps, as free parameters for the solver."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Protocol

import numpy as np

from slosched.perfmodel.columns import Array, Columns
from slosched.perfmodel.experts import ExpertLayers, touched_share
from slosched.perfmodel.graphs import PaddedLayers, padded
from slosched.perfmodel.layered import AnyLayers
from slosched.perfmodel.roofline import RooflineLayers, roofline_parameters
from slosched.perfmodel.solve import Parameter
from slosched.perfmodel.table import Knots, Table

_MAX_KNOTS = 14


class FreeLayers(Protocol):
    """Layers whose parameters are fitted together with those of attention."""

    parameters: tuple[Parameter, ...]

    def seconds(self, guesses: Array) -> Array:
        """Return the layers' seconds in every step, for guesses as `solve` makes them."""
        ...

    def build(self, values: Array) -> AnyLayers: ...


class FreeUnpadded(Protocol):
    """Free layers without CUDA graphs."""

    parameters: tuple[Parameter, ...]

    def seconds(self, guesses: Array) -> Array: ...

    def build(self, values: Array) -> Table | RooflineLayers | ExpertLayers: ...


FreeKind = Callable[[Columns, Array], FreeUnpadded]
"""What makes free layers from the sums and the times of the steps to be fitted."""


def free_layers(
    kind: FreeKind, graph_sizes: tuple[int, ...], c: Columns, seconds: Array
) -> FreeLayers:
    """Return free layers of this kind, padded to the sizes of CUDA graphs if there are any."""
    return FreePadded(kind, graph_sizes, c, seconds) if graph_sizes else kind(c, seconds)


class FreeRoofline:
    def __init__(self, c: Columns, seconds: Array) -> None:
        fastest_s = float(seconds.min())
        self.parameters = roofline_parameters(fastest_s, _token_s(c, seconds))
        self._num_tokens = c.num_tokens

    def seconds(self, guesses: Array) -> Array:
        return RooflineLayers(*guesses).at(self._num_tokens)

    @staticmethod
    def build(values: Array) -> RooflineLayers:
        return RooflineLayers(*values.tolist())


class FreeKnots:
    """A table with knots at measured counts; its parameters are rises, so that it cannot fall."""

    def __init__(self, c: Columns, seconds: Array) -> None:
        tokens = np.unique(c.num_tokens)
        spread = np.unique(np.geomspace(tokens[0], tokens[-1], _MAX_KNOTS).round())
        nearest = {float(tokens[np.abs(tokens - s).argmin()]) for s in spread}
        self._counts = tuple(int(t) for t in sorted(nearest))
        self._knots = Knots(self._counts, c.num_tokens)
        fastest_s, per_token_s = float(seconds.min()), _token_s(c, seconds)
        self.parameters = (
            Parameter("first_s", 0.8 * fastest_s, 0.01 * fastest_s, 10 * fastest_s),
            *(
                Parameter(
                    f"{low}_to_{high}_s",
                    0.5 * per_token_s * (high - low),
                    1e-4 * per_token_s * (high - low),
                    30 * per_token_s * (high - low),
                    weight=0.05,
                )
                for low, high in zip(self._counts, self._counts[1:], strict=False)
            ),
        )

    def seconds(self, guesses: Array) -> Array:
        return self._knots.read(np.cumsum(guesses[:, :, 0], axis=0).T)

    def build(self, values: Array) -> Table:
        return Table(self._counts, tuple(np.cumsum(values).tolist()))


class FreeExperts:
    """The experts that are touched, and knots for the rest."""

    def __init__(self, share_per_token: float, c: Columns, seconds: Array) -> None:
        self._share_per_token = share_per_token
        self._rest = FreeKnots(c, seconds)
        self._num_tokens = c.num_tokens
        fastest_s = float(seconds.min())
        self.parameters = (
            Parameter("experts_s", 4 * fastest_s, 0.01 * fastest_s, 100 * fastest_s),
            Parameter("evenness", 2, 0.1, 100, weight=0.05),
            *self._rest.parameters,
        )

    def seconds(self, guesses: Array) -> Array:
        experts_s, evenness = guesses[:2]
        touched = touched_share(self._num_tokens, self._share_per_token, evenness)
        return np.asarray(experts_s * touched + self._rest.seconds(guesses[2:]))

    def build(self, values: Array) -> ExpertLayers:
        experts_s, evenness = values[:2].tolist()
        return ExpertLayers(
            experts_s, evenness, self._share_per_token, self._rest.build(values[2:])
        )


class FreePadded:
    """Layers of steps that are padded to the sizes of CUDA graphs."""

    def __init__(
        self, kind: FreeKind, graph_sizes: tuple[int, ...], c: Columns, seconds: Array
    ) -> None:
        as_run = copy(c)
        as_run.num_tokens = padded(c.num_tokens, graph_sizes)
        self._graph_sizes = graph_sizes
        self._unpadded = kind(as_run, seconds)
        self.parameters = self._unpadded.parameters

    def seconds(self, guesses: Array) -> Array:
        return self._unpadded.seconds(guesses)

    def build(self, values: Array) -> PaddedLayers:
        return PaddedLayers(self._graph_sizes, self._unpadded.build(values))


def _token_s(c: Columns, seconds: Array) -> float:
    """Return the seconds per token of the largest step, where they are seen best."""
    return float(seconds[c.num_tokens.argmax()] / c.num_tokens.max())
