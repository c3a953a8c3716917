"""Fits of the layered forms: tables or a roofline for the layers, and attention by its kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from slosched.perfmodel.attention import (
    DECODE_PARAMETERS,
    PREFILL_PARAMETERS,
    DecodeAttention,
    JointAttention,
    JointKernel,
    PrefillAttention,
    SeparateAttention,
    joint_parameters,
)
from slosched.perfmodel.columns import Array, Columns
from slosched.perfmodel.errors import FitError
from slosched.perfmodel.fit_layers import FreeKnots, FreeLayers, FreeRoofline
from slosched.perfmodel.fit_linear import fit_linear
from slosched.perfmodel.layered import LayeredModel
from slosched.perfmodel.linear import LinearCoefficients
from slosched.perfmodel.measurement import Measurement, Part
from slosched.perfmodel.roofline import RooflineLayers
from slosched.perfmodel.solve import Estimate, Parameter, solve
from slosched.perfmodel.table import Table, monotone_table

_MIN_PURE = 4
_NO_REQUESTS = Table((1,), (0.0,))
_DECODE_S = len(DECODE_PARAMETERS)

_BaseParts = tuple[Table | RooflineLayers, Table]
"""The tables of layers and of requests: the part of a step outside attention."""


class FormUnfitError(FitError):
    """The profile lacks what this form needs; another form may still be fitted."""


def fit_roofline(
    measurements: Sequence[Measurement], seed: int
) -> tuple[LayeredModel, tuple[Estimate, ...]]:
    """Fit roofline layers and separate attention."""
    return _fit_all(measurements, FreeRoofline, seed)


def fit_profiled_separate(
    measurements: Sequence[Measurement], seed: int
) -> tuple[LayeredModel, tuple[Estimate, ...]]:
    """Fit tabulated layers and separate attention."""
    tables = _tables(measurements)
    if tables is None:
        return _fit_all(measurements, FreeKnots, seed)
    steps = _whole(measurements)
    c, seconds = _columns(steps)
    base = _base(tables, c)
    solution = solve(
        lambda v: base + _separate(v).column_seconds(c),
        seconds,
        _attention_parameters(steps),
        seed=seed,
    )
    model = LayeredModel(tables[0], tables[1], _separate(solution.values))
    return _with_swap(model, measurements, _separate_named(solution.estimates))


def fit_profiled_joint(
    measurements: Sequence[Measurement], provenance: Mapping[str, str], seed: int
) -> tuple[LayeredModel, tuple[Estimate, ...]]:
    """Fit tabulated layers and a joint attention kernel.

    The provenance must say `num_sms`, `num_query_heads` and `num_kv_heads` (of one device), since
    waves of thread blocks depend on them. If the layers alone were not profiled, they are fitted
    first, to the steps without a mix of chunks and decodes, where joint and separate kernels agree.
    Raises FormUnfitError if a fact or a kind of step is missing.
    """
    tiles_per_wave, group_size = _joint_facts(provenance)
    steps = _whole(measurements)
    decodes = [m for m in steps if not m.shape.num_prefills]
    chunks = [m for m in steps if m.shape.num_prefills]
    tables = _tables(measurements)
    _check_kinds(steps, need_prefills=tables is None)
    tables = tables or _tables_of_pure_steps(measurements, seed)
    c, seconds = _columns(decodes)
    base = _base(tables, c)
    decode = solve(
        lambda v: base + DecodeAttention(*v).column_seconds(c),
        seconds,
        _attention_parameters(steps)[:_DECODE_S],
        seed=seed,
    )
    alone = DecodeAttention(*decode.values.tolist())
    c2, seconds2 = _columns(chunks)
    base2 = _base(tables, c2)
    parameters = joint_parameters(alone, tiles_per_wave)

    def kernel(values: Array) -> JointKernel:
        named = {p.name: v for p, v in zip(parameters, values.tolist(), strict=True)}
        return JointKernel(tiles_per_wave=tiles_per_wave, group_size=group_size, **named)

    joint = solve(lambda v: base2 + kernel(v).column_seconds(c2), seconds2, parameters, seed=seed)
    model = LayeredModel(tables[0], tables[1], JointAttention(kernel(joint.values), alone))
    estimates = (*_named("decode", decode.estimates), *_named("kernel", joint.estimates))
    return _with_swap(model, measurements, estimates)


def _joint_facts(provenance: Mapping[str, str]) -> tuple[float, float]:
    try:
        sms, heads, kv_heads = (
            float(provenance[name]) for name in ("num_sms", "num_query_heads", "num_kv_heads")
        )
    except KeyError as error:
        raise FormUnfitError(
            f"a joint kernel's waves depend on {error.args[0]}, which the provenance does not say"
        ) from error
    return sms / heads, heads / kv_heads


def _check_kinds(steps: Sequence[Measurement], *, need_prefills: bool) -> None:
    """Raise FormUnfitError if there are too few steps of one kind alone.

    The kernel of decodes is fitted to steps of decodes alone. Layers that were not profiled are
    fitted to steps of decodes alone and of prefill chunks alone.
    """
    counts = Counter(m.regime for m in steps)
    needed = {"decode": _MIN_PURE, **({"prefill": _MIN_PURE} if need_prefills else {})}
    for regime, least in needed.items():
        if counts[regime] < least:
            raise FormUnfitError(
                f"joint kernels are told from the rest by at least {least} steps of {regime} "
                f"alone, and {counts[regime]} are there to be fitted"
            )


def _named(part: str, estimates: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """Put the part's name in front of each estimate's, since several parts share names."""
    return tuple(replace(e, name=f"{part}: {e.name}") for e in estimates)


def _separate_named(estimates: Sequence[Estimate]) -> tuple[Estimate, ...]:
    return (
        *_named("decode", estimates[:_DECODE_S]),
        *_named("prefill", estimates[_DECODE_S:]),
    )


def _whole(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements of whole steps without swaps."""
    return [m for m in measurements if m.part is Part.STEP and not m.num_swapped_blocks]


def _columns(measurements: Sequence[Measurement]) -> tuple[Columns, Array]:
    return Columns([m.shape for m in measurements]), np.array([m.seconds for m in measurements])


def _base(tables: _BaseParts, c: Columns) -> Array:
    layers, requests = tables
    return layers.at(c.num_tokens) + requests.at(c.num_reqs)


def _tables(measurements: Sequence[Measurement]) -> _BaseParts | None:
    """Return the tables of layers and requests that a profiler of single operators measured.

    Returns None if the layers were not measured apart from attention.
    """
    rows = [m for m in measurements if m.part is Part.LAYERS]
    alone = [m for m in rows if len(m.chunks) == 1]
    if len(alone) < 2:
        return None
    layers = monotone_table([m.shape.num_tokens for m in alone], [m.seconds for m in alone])
    many = [m for m in rows if len(m.chunks) > 1]
    if not many:
        return layers, _NO_REQUESTS
    counts = np.array([float(m.shape.num_reqs) for m in many])
    tokens = np.array([float(m.shape.num_tokens) for m in many])
    extra_s = np.maximum.accumulate(np.array([m.seconds for m in many]) - layers.at(tokens))
    extra_s = np.maximum(0.0, extra_s)
    return layers, Table(
        (1, *counts.astype(int).tolist()), (0.0, *np.maximum.accumulate(extra_s).tolist())
    )


def _tables_of_pure_steps(measurements: Sequence[Measurement], seed: int) -> _BaseParts:
    pure = [m for m in measurements if m.regime != "mixed"]
    model, _ = _fit_all(pure, FreeKnots, seed)
    return model.layers, model.requests


def _fit_all(
    measurements: Sequence[Measurement],
    free: Callable[[Columns, Array], FreeLayers],
    seed: int,
) -> tuple[LayeredModel, tuple[Estimate, ...]]:
    """Fit layers, requests and separate attention together."""
    rows = [m for m in measurements if not m.num_swapped_blocks]
    c, seconds = _columns(rows)
    layers = free(c, seconds)
    attends = np.array([m.part is Part.STEP for m in rows])
    num_layers = len(layers.parameters)
    request_s = 0.01 * float(seconds.min())
    parameters = (
        *layers.parameters,
        Parameter("per_request_s", request_s, 1e-4 * request_s, 1e3 * request_s),
        *_attention_parameters(_whole(rows)),
    )

    def predict(values: Array) -> Array:
        base = layers.build(values[:num_layers]).at(c.num_tokens)
        base = base + values[num_layers] * (c.num_reqs - 1)
        attention = _separate(values[num_layers + 1 :]).column_seconds(c)
        return np.asarray(base + np.where(attends, attention, 0.0))

    solution = solve(predict, seconds, parameters, seed=seed)
    values = solution.values
    model = LayeredModel(
        layers.build(values[:num_layers]),
        Table((1, 2), (0.0, float(values[num_layers]))),
        _separate(values[num_layers + 1 :]),
    )
    estimates = solution.estimates
    named = (
        *_named("layers", estimates[:num_layers]),
        estimates[num_layers],
        *_separate_named(estimates[num_layers + 1 :]),
    )
    return _with_swap(model, measurements, named)


def _separate(values: Array) -> SeparateAttention:
    decode, prefill = values[:_DECODE_S].tolist(), values[_DECODE_S:].tolist()
    return SeparateAttention(PrefillAttention(*prefill), DecodeAttention(*decode))


def _attention_parameters(steps: Sequence[Measurement]) -> tuple[Parameter, ...]:
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


def _with_swap(
    model: LayeredModel, measurements: Sequence[Measurement], estimates: tuple[Estimate, ...]
) -> tuple[LayeredModel, tuple[Estimate, ...]]:
    """Fit C6, the time per swapped block, to what the model leaves unexplained of swap steps."""
    swaps = [m for m in measurements if m.num_swapped_blocks]
    if not swaps:
        return model, (*estimates, Estimate("per_swapped_block_s", 0.0, 0.0, 0.0, False))
    measured = np.array([m.seconds for m in swaps])
    blocks = np.array([m.num_swapped_blocks for m in swaps]) / measured
    left = 1 - np.array([model.predict(m.shape) for m in swaps]) / measured
    per_block_s = max(0.0, float(left @ blocks / (blocks @ blocks)))
    freedom = max(1, len(swaps) - 1)
    spread_s = float(np.linalg.norm(left - per_block_s * blocks) / np.linalg.norm(blocks))
    width_s = 1.96 * spread_s / freedom**0.5
    low_s, high_s = max(0.0, per_block_s - width_s), per_block_s + width_s
    swap = Estimate("per_swapped_block_s", per_block_s, low_s, high_s, True)
    model = LayeredModel(model.layers, model.requests, model.attention, per_block_s)
    return model, (*estimates, swap)
