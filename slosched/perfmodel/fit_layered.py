"""Fits of the layered forms with separate attention kernels, and what all layered fits share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from slosched.perfmodel.attention import (
    DECODE_PARAMETERS,
    PREFILL_PARAMETERS,
    DecodeAttention,
    PrefillAttention,
    SeparateAttention,
)
from slosched.perfmodel.columns import Array, Columns
from slosched.perfmodel.errors import FitError
from slosched.perfmodel.fit_layers import (
    FreeExperts,
    FreeKind,
    FreeKnots,
    FreeRoofline,
    free_layers,
)
from slosched.perfmodel.fit_linear import fit_linear
from slosched.perfmodel.graphs import PaddedLayers, StepGraphs, graphs_of
from slosched.perfmodel.launches import FreeLaunches
from slosched.perfmodel.layered import AnyLayers, LayeredModel
from slosched.perfmodel.linear import LinearCoefficients
from slosched.perfmodel.measurement import Measurement, Part
from slosched.perfmodel.model import FittedModel
from slosched.perfmodel.solve import Estimate, Parameter, solve
from slosched.perfmodel.table import Table, monotone_table

_NO_REQUESTS = Table((1,), (0.0,))
NUM_DECODE = len(DECODE_PARAMETERS)

Fitted = tuple[LayeredModel, tuple[Estimate, ...]]
Base = tuple[AnyLayers, Table]
"""The layers and the table of requests: the part of a step outside attention."""


class FormUnfitError(FitError):
    """The profile lacks what this form needs; another form may still be fitted."""


def fit_roofline(
    measurements: Sequence[Measurement], provenance: Mapping[str, str], seed: int
) -> Fitted:
    """Fit roofline layers and separate attention."""
    return fit_free_separate(measurements, FreeRoofline, graphs_of(provenance), seed)


def fit_profiled_separate(
    measurements: Sequence[Measurement], provenance: Mapping[str, str], seed: int
) -> Fitted:
    """Fit tabulated layers and separate attention."""
    graphs = graphs_of(provenance)
    tables = operator_tables(measurements, graphs)
    if tables is None:
        return fit_free_separate(measurements, FreeKnots, graphs, seed)
    steps = whole_steps(measurements)
    c, seconds = columns(steps)
    base = base_seconds(tables, c)
    solution = solve(
        lambda v: base + _separate(v).column_seconds(c),
        seconds,
        attention_parameters(steps),
        seed=seed,
    )
    model = LayeredModel(tables[0], tables[1], _separate(solution.values.tolist()))
    return with_swap(model, measurements, _separate_named(solution.estimates))


def fit_experts_separate(
    measurements: Sequence[Measurement], provenance: Mapping[str, str], seed: int
) -> Fitted:
    """Fit layers that read the experts they touch, and separate attention."""
    experts = free_experts(provenance)
    return fit_free_separate(measurements, experts, graphs_of(provenance), seed)


def free_experts(provenance: Mapping[str, str]) -> FreeKind:
    """Return free layers of a mixture of experts, as the provenance describes it.

    Raises FormUnfitError if the provenance does not say that the model is one.
    """
    why = "how many experts a step touches depends on"
    per_token, total = (
        fact(provenance, name, why) for name in ("num_experts_per_token", "num_experts")
    )
    if not 0 < per_token < total:
        raise FormUnfitError(
            f"{why} how many there are: {per_token:g} of {total:g} for each token are no mixture"
        )
    return partial(FreeExperts, per_token / total)


def fact(provenance: Mapping[str, str], name: str, why: str) -> float:
    """Return a number that the profile's provenance says, or raise FormUnfitError."""
    try:
        return float(provenance[name])
    except KeyError as error:
        raise FormUnfitError(f"{why} {name}, which the provenance does not say") from error
    except ValueError as error:
        raise FormUnfitError(
            f"{why} {name}, and {provenance[name]!r} in the provenance is not a number"
        ) from error


def named(part: str, estimates: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """Put the part's name in front of each estimate's, since several parts share names."""
    return tuple(replace(e, name=f"{part}: {e.name}") for e in estimates)


def _separate_named(estimates: Sequence[Estimate]) -> tuple[Estimate, ...]:
    return (
        *named("decode", estimates[:NUM_DECODE]),
        *named("prefill", estimates[NUM_DECODE:]),
    )


def whole_steps(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements of whole steps without swaps."""
    return [m for m in _without_swaps(measurements) if m.part is Part.STEP]


def _without_swaps(measurements: Sequence[Measurement]) -> list[Measurement]:
    return [m for m in measurements if not m.num_swapped_blocks]


def columns(measurements: Sequence[Measurement]) -> tuple[Columns, Array]:
    """Return the sums of the batches, and their times."""
    return Columns([m.shape for m in measurements]), np.array([m.seconds for m in measurements])


def base_seconds(base: Base, c: Columns) -> Array:
    """Return the seconds of steps without their attention."""
    layers, requests = base
    return layers.at(c.num_tokens) + requests.at(c.num_reqs)


def operator_tables(measurements: Sequence[Measurement], graphs: StepGraphs) -> Base | None:
    """Return the tables of layers and requests that a profiler of single operators measured.

    Operators are measured without CUDA graphs; whole steps are padded to the sizes of graphs.
    Returns None if the layers were not measured apart from attention.
    """
    rows = [m for m in measurements if m.part is Part.LAYERS]
    alone = [m for m in rows if len(m.chunks) == 1]
    if len(alone) < 2:
        return None
    layers = monotone_table([m.shape.num_tokens for m in alone], [m.seconds for m in alone])
    as_run = PaddedLayers(graphs.sizes, layers) if graphs.sizes else layers
    many = [m for m in rows if len(m.chunks) > 1]
    if not many:
        return as_run, _NO_REQUESTS
    many.sort(key=lambda m: m.shape.num_reqs)  # a file may have them in any order
    tokens = np.array([float(m.shape.num_tokens) for m in many])
    extra_s = np.array([m.seconds for m in many]) - layers.at(tokens)
    extra_s = np.maximum.accumulate(np.maximum(0.0, extra_s))
    counts = [m.shape.num_reqs for m in many]
    table = {1: 0.0, **dict(zip(counts, extra_s.tolist(), strict=True))}  # the most of each count
    return as_run, Table(tuple(table), tuple(table.values()))


def fit_free_separate(
    measurements: Sequence[Measurement],
    kind: FreeKind,
    graphs: StepGraphs,
    seed: int,
) -> Fitted:
    """Fit layers, requests, separate attention and launches together."""
    # Operators are measured without graphs, so they say nothing about layers that are padded.
    rows = whole_steps(measurements) if graphs.sizes else _without_swaps(measurements)
    c, seconds = columns(rows)
    layers = free_layers(kind, graphs.sizes, c, seconds)
    launches = FreeLaunches(graphs, c, seconds)
    attends = np.array([m.part is Part.STEP for m in rows])
    attention = attention_parameters(whole_steps(rows))
    parameters = (
        *layers.parameters,
        request_parameter(seconds),
        *attention,
        *launches.parameters,
    )
    ends = np.cumsum([len(layers.parameters), 1, len(attention)]).tolist()

    def predict(guesses: Array) -> Array:
        of_layers, [per_request_s], of_attention, of_launches = np.split(guesses, ends)
        attention_s = _separate(of_attention).column_seconds(c)
        device_s = layers.seconds(of_layers) + np.where(attends, attention_s, 0.0)
        requests_s = per_request_s * (c.num_reqs - 1)
        return np.asarray(launches.at_least(device_s, of_launches) + requests_s)

    solution = solve(predict, seconds, parameters, seed=seed)
    of_layers, [per_request_s], of_attention, of_launches = np.split(solution.values, ends)
    model = LayeredModel(
        layers.build(of_layers),
        request_table(float(per_request_s)),
        _separate(of_attention.tolist()),
        launches=launches.build(of_launches),
    )
    layer_fits, [request_fit], attention_fits, launch_fits = parts(solution.estimates, ends)
    by_part = (
        *named("layers", layer_fits),
        request_fit,
        *_separate_named(attention_fits),
        *launch_fits,
    )
    return with_swap(model, measurements, by_part)


def parts(estimates: Sequence[Estimate], ends: Sequence[int]) -> list[Sequence[Estimate]]:
    """Return the estimates up to each of `ends`, and those behind the last."""
    bounds = zip([0, *ends], [*ends, len(estimates)], strict=True)
    return [estimates[low:high] for low, high in bounds]


def request_parameter(seconds: Array) -> Parameter:
    """Return the parameter of the time that each request after the first one takes."""
    request_s = 0.01 * float(seconds.min())
    return Parameter("per_request_s", request_s, 1e-4 * request_s, 1e3 * request_s)


def request_table(per_request_s: float) -> Table:
    return Table((1, 2), (0.0, per_request_s))


def _separate(values: Array | list[float]) -> SeparateAttention:
    """Return the attention of these parameters, or of many guesses at once (see `solve`)."""
    decode, prefill = values[:NUM_DECODE], values[NUM_DECODE:]
    return SeparateAttention(PrefillAttention(*prefill), DecodeAttention(*decode))


def attention_parameters(steps: Sequence[Measurement]) -> tuple[Parameter, ...]:
    """Return the parameters of separate attention, started from a fit of the linear formula."""
    linear = fit_linear(steps)[0].coefficients
    starts = {
        "per_context_token_s": linear.per_context_s,
        "per_longest_context_token_s": 0.1 * linear.per_context_s,
        "per_pair_s": linear.per_attention_s,
        "per_key_s": linear.per_context_s,
        "per_token_s": 0.1 * linear.per_token_s,
        **_launches(linear, steps),
    }
    return tuple(
        Parameter(p.name, min(max(starts[p.name], 10 * p.low), p.high / 10), p.low, p.high)
        for p in (*DECODE_PARAMETERS, *PREFILL_PARAMETERS)
    )


def _launches(linear: LinearCoefficients, steps: Sequence[Measurement]) -> dict[str, float]:
    """Return first values for launch times: 1 % of the fastest step, as is usual for a kernel."""
    launch_s = 0.01 * min(m.seconds for m in steps)
    return {
        "launch_s": max(linear.any_decode_s, launch_s),
        "per_request_s": 0.01 * launch_s,
        "per_chunk_s": launch_s,
    }


def with_swap(
    model: LayeredModel, measurements: Sequence[Measurement], estimates: tuple[Estimate, ...]
) -> Fitted:
    """Add the time per swapped block to a model and to the estimates of its parameters."""
    swap = fit_swap(model, measurements)
    if swap.value:
        model = replace(model, per_swapped_block_s=swap.value)
    return model, (*estimates, swap)


def fit_swap(model: FittedModel, measurements: Sequence[Measurement]) -> Estimate:
    """Fit C6, the time per swapped block, to what the model leaves unexplained of swap steps."""
    swaps = [m for m in measurements if m.num_swapped_blocks]
    if not swaps:
        return Estimate("per_swapped_block_s", 0.0, 0.0, 0.0, False)
    measured = np.array([m.seconds for m in swaps])
    blocks = np.array([m.num_swapped_blocks for m in swaps]) / measured
    left = 1 - np.array([model.predict(m.shape) for m in swaps]) / measured
    per_block_s = max(0.0, float(left @ blocks / (blocks @ blocks)))
    freedom = max(1, len(swaps) - 1)
    spread_s = float(np.linalg.norm(left - per_block_s * blocks) / np.linalg.norm(blocks))
    width_s = 1.96 * spread_s / freedom**0.5
    low_s, high_s = max(0.0, per_block_s - width_s), per_block_s + width_s
    return Estimate("per_swapped_block_s", per_block_s, low_s, high_s, True)
