"""The time of a step as a sum: layers of T tokens, head of S requests, attention, and swap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slosched.core import BatchShape
from slosched.perfmodel.attention import (
    DecodeAttention,
    FlashDecodeAttention,
    JointAttention,
    JointKernel,
    PrefillAttention,
    SeparateAttention,
)
from slosched.perfmodel.columns import Array, Columns
from slosched.perfmodel.experts import ExpertLayers
from slosched.perfmodel.graphs import PaddedLayers
from slosched.perfmodel.launches import Launches
from slosched.perfmodel.model import FittedModel
from slosched.perfmodel.roofline import RooflineLayers
from slosched.perfmodel.table import Table

_MAX_READY = 16_384
"""Counts of tokens and of requests up to which times are computed when a model is made."""


AnyLayers = Table | RooflineLayers | ExpertLayers | PaddedLayers
"""Seconds of all that depends on a count alone; they never fall as the count grows."""


@dataclass(eq=False)
class LayeredModel(FittedModel):
    """T = layers(t + Bd) + attention(shape) + requests(N + Bd) + C6·num_swap.

    t is the tokens of the prefill chunks, N the number of chunks, and Bd the number of decodes.
    `layers` is a table that was profiled, a roofline, or the experts that are touched and a table.
    `attention` follows the backend's kernels. `requests` is what each request costs outside both,
    in the language head and in sampling. Where steps run without a CUDA graph, layers and attention
    take as long as their `launches` at least.
    """

    layers: AnyLayers
    requests: Table
    attention: SeparateAttention | JointAttention
    per_swapped_block_s: float = 0.0
    launches: Launches | None = None
    """None if the GPU is never ahead of the host, or if that is not known."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = np.arange(_MAX_READY + 1, dtype=np.float64)
        self._layers_s: list[float] = self.layers.at(counts).tolist()
        self._requests_s: list[float] = self.requests.at(counts).tolist()
        # A closure over the tables is faster than a method that reads them from the instance.
        self.predict = self._asked()  # type: ignore[method-assign, assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model by its parameters, because closures cannot be pickled."""
        return _rebuilt, (self.parameters(), self.description())

    @property
    def form(self) -> str:
        kind = self.layers.kind
        return kind if kind == RooflineLayers.kind else f"{kind}-{self.attention.kind}"

    @property
    def swapped_block_s(self) -> float:
        return self.per_swapped_block_s

    def predict(self, shape: BatchShape) -> float:
        return self._asked()(shape)  # never run: `__post_init__` puts a closure in its place

    def _asked(self) -> Callable[[BatchShape], float]:
        if self.launches is None:
            return self._on_the_device()
        most, requests_s, block_s = _MAX_READY, self._requests_s, self.per_swapped_block_s

        def other_s(shape: BatchShape) -> float:
            num_reqs = min(shape.num_prefills + shape.num_decodes, most)
            return requests_s[num_reqs] + block_s * shape.num_swapped_blocks

        return self.launches.asked(self._on_the_device(), other_s)

    def _on_the_device(self) -> Callable[[BatchShape], float]:
        """Return a function that predicts as if launches took no time."""
        layers_s, requests_s = self._layers_s, self._requests_s
        attention_s, block_s = self.attention.asked(), self.per_swapped_block_s

        def predict(shape: BatchShape) -> float:
            num_decodes = shape.num_decodes
            num_tokens = shape.num_prefill_tokens + num_decodes + shape.num_draft_tokens
            if not num_tokens:
                return block_s * shape.num_swapped_blocks  # no layer runs
            try:
                return (
                    layers_s[num_tokens]
                    + requests_s[shape.num_prefills + num_decodes]
                    + attention_s(shape)
                    + block_s * shape.num_swapped_blocks
                )
            except IndexError:  # beyond _MAX_READY; a `try` costs nothing where it does not raise
                return float(self.column_seconds(Columns([shape]))[0])

        return predict

    def decode_ends(
        self, shape: BatchShape, start_s: float, most: int, until_s: float, factor: float = 1.0
    ) -> list[float]:
        num_decodes = shape.num_decodes
        launches = self.launches
        has_graph = launches is None or num_decodes <= launches.most_decodes
        if not (has_graph and 0 < num_decodes <= _MAX_READY):
            return super().decode_ends(shape, start_s, most, until_s, factor)
        other_s = self._layers_s[num_decodes] + self._requests_s[num_decodes]
        decode = self.attention.decode
        return decode.successive_ends(shape, other_s, start_s, most, until_s, factor)

    def column_seconds(self, c: Columns) -> Array:
        """Return the seconds of many shapes at once, each of which has at least one request."""
        requests_s = self.requests.at(c.num_reqs)
        swaps_s = self.per_swapped_block_s * c.num_swapped_blocks
        attention_s = self.attention.column_seconds(c)
        seconds = self.layers.at(c.num_tokens) + requests_s + attention_s + swaps_s
        if self.launches is None:
            return seconds
        return self.launches.at_least(seconds, c, requests_s + swaps_s)

    def parameters(self) -> dict[str, Any]:
        return {
            "layers": asdict(self.layers),
            "requests": asdict(self.requests),
            "attention": {"kind": self.attention.kind, **asdict(self.attention)},
            "per_swapped_block_s": self.per_swapped_block_s,
            **({"launches": asdict(self.launches)} if self.launches is not None else {}),
        }


def layered_from(parameters: Mapping[str, Any], **described: Any) -> LayeredModel:
    """Build the model that has these `LayeredModel.parameters`.

    Raises KeyError or TypeError if they do not fit.
    """
    return LayeredModel(
        _layers_from(parameters["layers"]),
        _table_from(parameters["requests"]),
        _attention_from(parameters["attention"]),
        float(parameters["per_swapped_block_s"]),
        Launches(**parameters["launches"]) if "launches" in parameters else None,
        **described,
    )


def _rebuilt(parameters: Mapping[str, Any], description: Mapping[str, Any]) -> LayeredModel:
    return layered_from(parameters, **description)


def _layers_from(values: Mapping[str, Any]) -> AnyLayers:
    if "graph_sizes" in values:
        return PaddedLayers(tuple(values["graph_sizes"]), _unpadded_from(values["layers"]))
    return _unpadded_from(values)


def _unpadded_from(values: Mapping[str, Any]) -> Table | RooflineLayers | ExpertLayers:
    if "counts" in values:
        return _table_from(values)
    if "experts_s" in values:
        return ExpertLayers(**{**values, "rest": _table_from(values["rest"])})
    return RooflineLayers(**values)


def _table_from(values: Mapping[str, Any]) -> Table:
    return Table(tuple(values["counts"]), tuple(values["times_s"]))


def _attention_from(values: Mapping[str, Any]) -> SeparateAttention | JointAttention:
    kind = FlashDecodeAttention if "first_whole" in values["decode"] else DecodeAttention
    decode = kind(**values["decode"])
    if values["kind"] == "joint":
        return JointAttention(JointKernel(**values["kernel"]), decode)
    return SeparateAttention(PrefillAttention(**values["prefill"]), decode)
