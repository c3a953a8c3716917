"""CUDA graphs: a step runs as the next larger batch that was captured."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from slosched.perfmodel.columns import Array
from slosched.perfmodel.errors import FitError
from slosched.perfmodel.experts import ExpertLayers
from slosched.perfmodel.measurement import Profile
from slosched.perfmodel.roofline import RooflineLayers
from slosched.perfmodel.table import Table

GRAPH_SIZES = "graph_sizes"
"""The name, in a profile's provenance, of the numbers of tokens whose graphs were captured.

They are written as `parse_step_graphs` reads them.
"""

_VLLM_LIMIT = 512
_DECODES_ALONE = "decodes:"


@dataclass(frozen=True)
class StepGraphs:
    """The numbers of tokens that have a CUDA graph, in steps of all kinds or of decodes alone."""

    sizes: tuple[int, ...] = ()
    decodes_alone: bool = False

    def __str__(self) -> str:
        return _DECODES_ALONE * self.decodes_alone + ",".join(map(str, self.sizes))

    @property
    def most_tokens(self) -> int:
        """Return up to how many tokens steps of any kind have a graph."""
        return 0 if self.decodes_alone else self.most_decodes

    @property
    def most_decodes(self) -> int:
        """Return up to how many decodes steps of decodes alone have a graph."""
        return self.sizes[-1] if self.sizes else 0


@dataclass(frozen=True)
class PaddedLayers:
    """Layers of a step that is padded with idle tokens up to the next captured size.

    A step with more tokens than the largest size runs without a graph, and is not padded.
    """

    graph_sizes: tuple[int, ...]
    layers: Table | RooflineLayers | ExpertLayers

    def __post_init__(self) -> None:
        if list(self.graph_sizes) != sorted(set(self.graph_sizes)) or self.graph_sizes[:1] < (1,):
            raise ValueError(f"the sizes of graphs must rise from 1 or more: {self.graph_sizes}")

    @property
    def kind(self) -> str:
        return self.layers.kind

    def at(self, counts: Array) -> Array:
        return self.layers.at(padded(counts, self.graph_sizes))


def padded(num_tokens: Array, graph_sizes: tuple[int, ...]) -> Array:
    """Return the tokens that steps of `num_tokens` compute, idle ones included."""
    sizes = np.array(graph_sizes, dtype=np.float64)
    next_size = sizes[np.minimum(np.searchsorted(sizes, num_tokens), len(sizes) - 1)]
    return np.asarray(np.maximum(num_tokens, next_size))


def vllm_graph_sizes(limit: int = _VLLM_LIMIT) -> tuple[int, ...]:
    """Return the sizes that vLLM captures by default: 1, 2, 4, 8, 16, …, 256, 272, … up to `limit`.

    vLLM takes 512 as the limit, or 2 · max_num_seqs if that is less (1024 on data-centre
    Blackwells). Source: `VllmConfig._set_cudagraph_sizes` of vLLM 0.32. By default it replays full
    graphs for decodes and piecewise graphs for all other steps, so that every step is padded.
    """
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16))
    return sizes[: bisect_right(sizes, limit)]


def parse_graph_sizes(text: str) -> tuple[int, ...]:
    """Read `vllm`, `vllm:256` (the sizes up to a limit), `none`, or a list such as `1,2,4,8`.

    Raises FitError if it is none of these.
    """
    name, _, limit = text.partition(":")
    try:
        if name == "none" and not limit:
            return ()
        if name == "vllm":
            sizes = vllm_graph_sizes(int(limit)) if limit else vllm_graph_sizes()
        else:
            sizes = tuple(sorted({int(size) for size in text.split(",")}))
        if not sizes or sizes[0] < 1:
            raise ValueError(text)
    except ValueError as error:
        raise FitError(
            f"{text!r} are no sizes of CUDA graphs; write vllm, vllm:256 for sizes up to 256 "
            "tokens, a list such as 1,2,4,8, or none; decodes:1,2,4,8 if decodes alone have graphs"
        ) from error
    return sizes


def parse_step_graphs(text: str) -> StepGraphs:
    """Read sizes as `parse_graph_sizes` does, of decodes alone if `decodes:` stands before them."""
    sizes = parse_graph_sizes(text.removeprefix(_DECODES_ALONE))
    return StepGraphs(sizes, text.startswith(_DECODES_ALONE))


def with_graph_sizes(profile: Profile, text: str, form: str) -> Profile:
    """Return a profile of steps that had these graphs (see `parse_step_graphs`).

    Raises FitError if the form has no layers to be padded.
    """
    graphs = parse_step_graphs(text)
    if graphs.sizes and form.startswith("linear"):
        raise FitError(
            f"the form {form} counts tokens as they are; sizes of CUDA graphs need one of the "
            "others, or --graph-sizes none"
        )
    facts = {name: value for name, value in profile.provenance.items() if name != GRAPH_SIZES}
    if graphs.sizes:
        facts[GRAPH_SIZES] = str(graphs)
    return replace(profile, provenance=facts)


def graphs_of(provenance: Mapping[str, str]) -> StepGraphs:
    """Return the graphs that a profile names, none if it names none."""
    return parse_step_graphs(provenance.get(GRAPH_SIZES) or "none")
