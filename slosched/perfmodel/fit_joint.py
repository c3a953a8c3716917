"""Fits of the layered forms whose attention is one kernel for chunks and decodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slosched.core import BatchShape
from slosched.perfmodel.attention import (
    DecodeAttention,
    FlashDecodeAttention,
    JointAttention,
    JointKernel,
)
from slosched.perfmodel.attention.flash_decode import first_whole_decodes, flash_parameters
from slosched.perfmodel.attention.joint import joint_parameters
from slosched.perfmodel.columns import Array
from slosched.perfmodel.fit_layered import (
    NUM_DECODE,
    Base,
    Fitted,
    FormUnfitError,
    attention_parameters,
    base_seconds,
    columns,
    fact,
    fit_free_separate,
    free_experts,
    named,
    operator_tables,
    parts,
    request_parameter,
    request_table,
    whole_steps,
    with_swap,
)
from slosched.perfmodel.fit_layers import FreeKind, FreeKnots, free_layers
from slosched.perfmodel.graphs import StepGraphs, graphs_of
from slosched.perfmodel.launches import FreeLaunches
from slosched.perfmodel.layered import LayeredModel
from slosched.perfmodel.measurement import Measurement
from slosched.perfmodel.solve import Estimate, Parameter, solve
from slosched.perfmodel.table import Knots

_MIN_PURE = 4
_UNEQUAL = 1.5
"""Longest context of a step's decodes over their mean from which on they count as unequal."""


def fit_profiled_joint(
    measurements: Sequence[Measurement], provenance: Mapping[str, str], seed: int
) -> Fitted:
    """Fit tabulated layers and a joint attention kernel.

    The provenance must say `num_sms`, `num_query_heads` and `num_kv_heads` (of one device), since
    waves of thread blocks depend on them. Raises FormUnfitError if a fact or a kind of step is
    missing.
    """
    grid = _Grid.of(provenance)
    graphs = graphs_of(provenance)
    tables = operator_tables(measurements, graphs)
    if tables is None:
        return _fit_free_joint(measurements, FreeKnots, graphs, grid, seed)
    steps = whole_steps(measurements)
    _check_kinds(steps, ("decode",))
    decode, decode_estimates = _Decodes.of(steps, grid).fit(steps, tables, seed)
    chunks = [m for m in steps if m.shape.num_prefills]
    c, seconds = columns(chunks)
    base = base_seconds(tables, c)
    parameters = joint_parameters(decode, grid.tiles_per_wave)
    solution = solve(
        lambda v: base + grid.kernel(parameters, v).column_seconds(c),
        seconds,
        parameters,
        seed=seed,
    )
    kernel = grid.kernel(parameters, solution.values.tolist())
    model = LayeredModel(tables[0], tables[1], JointAttention(kernel, decode))
    estimates = (*decode_estimates, *named("kernel", solution.estimates))
    return with_swap(model, measurements, estimates)


def fit_experts_joint(
    measurements: Sequence[Measurement], provenance: Mapping[str, str], seed: int
) -> Fitted:
    """Fit layers that read the experts they touch, and a joint attention kernel.

    It needs the same facts as `fit_profiled_joint`, and those of the experts.
    """
    experts, graphs = free_experts(provenance), graphs_of(provenance)
    return _fit_free_joint(measurements, experts, graphs, _Grid.of(provenance), seed)


@dataclass(frozen=True)
class _Grid:
    """What the GPU and the model say about the launch of a joint kernel."""

    tiles_per_wave: float
    group_size: float
    num_kv_heads: float
    first_whole: float
    """Decodes from which on their kernel splits no keys."""

    @classmethod
    def of(cls, provenance: Mapping[str, str]) -> _Grid:
        sms, heads, kv_heads = (
            fact(provenance, name, "a joint kernel's waves depend on")
            for name in ("num_sms", "num_query_heads", "num_kv_heads")
        )
        first_whole = first_whole_decodes(sms, kv_heads)
        return cls(sms / heads, heads / kv_heads, kv_heads, first_whole)

    def kernel(self, parameters: Sequence[Parameter], values: Array | list[float]) -> JointKernel:
        """Return the kernel of these parameters, or of many guesses at once (see `solve`)."""
        fitted = {p.name: v for p, v in zip(parameters, values, strict=True)}
        return JointKernel(tiles_per_wave=self.tiles_per_wave, group_size=self.group_size, **fitted)


def _check_kinds(steps: Sequence[Measurement], needed: Sequence[str]) -> None:
    """Raise FormUnfitError if there are too few steps of one kind alone.

    The kernel of decodes is fitted to steps of decodes alone. Layers that were not profiled are
    fitted to steps of decodes alone and of prefill chunks alone, before the mixed steps join.
    """
    counts = Counter(m.regime for m in steps)
    for regime in needed:
        if counts[regime] < _MIN_PURE:
            raise FormUnfitError(
                f"joint kernels are told from the rest by at least {_MIN_PURE} steps of {regime} "
                f"alone, and {counts[regime]} are there to be fitted"
            )


@dataclass(frozen=True)
class _Decodes:
    """The kernel of decodes that can be fitted to some steps."""

    parameters: tuple[Parameter, ...]
    first_whole: float | None
    """None if no step tells how much longer unequal contexts take."""

    @classmethod
    def of(cls, steps: Sequence[Measurement], grid: _Grid) -> _Decodes:
        parameters = attention_parameters(steps)[:NUM_DECODE]
        telling = [m for m in steps if _is_unequal(m.shape, grid.first_whole)]
        if len(telling) < _MIN_PURE:
            return cls(parameters, None)
        [launch] = (p for p in parameters if p.name == "launch_s")
        flash = flash_parameters(launch.start, grid.num_kv_heads, grid.first_whole)
        return cls((*parameters, *flash), grid.first_whole)

    def kernel(self, values: Array | list[float]) -> DecodeAttention:
        """Return the kernel of these parameters, or of many guesses at once (see `solve`)."""
        if self.first_whole is None:
            return DecodeAttention(*values)
        return FlashDecodeAttention(*[*values, self.first_whole])

    def fit(
        self, steps: Sequence[Measurement], base: Base, seed: int
    ) -> tuple[DecodeAttention, tuple[Estimate, ...]]:
        """Fit the kernel to the steps of decodes alone."""
        c, seconds = columns([m for m in steps if not m.shape.num_prefills])
        base_s = base_seconds(base, c)
        solution = solve(
            lambda v: base_s + self.kernel(v).column_seconds(c),
            seconds,
            self.parameters,
            seed=seed,
        )
        return self.kernel(solution.values.tolist()), named("decode", solution.estimates)


def _is_unequal(shape: BatchShape, first_whole: float) -> bool:
    """Tell whether a step has decodes alone, of unequal contexts, whose keys are not split."""
    longest, num_decodes = shape.max_decode_context_tokens, shape.num_decodes
    is_alone = not shape.num_prefills and num_decodes >= first_whole
    return is_alone and longest * num_decodes > _UNEQUAL * shape.decode_context_tokens


def _fit_free_joint(
    measurements: Sequence[Measurement],
    kind: FreeKind,
    graphs: StepGraphs,
    grid: _Grid,
    seed: int,
) -> Fitted:
    """Fit layers, requests, the kernel of decodes and the joint kernel together.

    It starts from the decode kernel that steps of one kind alone show, where joint and separate
    kernels agree; from there, other starts found nothing better.
    """
    steps = whole_steps(measurements)
    _check_kinds(steps, ("decode", "prefill"))
    pure = [m for m in steps if m.regime != "mixed"]
    first, _ = fit_free_separate(pure, kind, graphs, seed)
    decodes = _Decodes.of(steps, grid)
    alone, _ = decodes.fit(steps, (first.layers, first.requests), seed)
    c, seconds = columns(steps)
    layers = free_layers(kind, graphs.sizes, c, seconds)
    launches = FreeLaunches(graphs, c, seconds)
    requests = Knots((1, 2), c.num_reqs)
    kernel = joint_parameters(alone, grid.tiles_per_wave)
    decode = [
        replace(p, start=start) for p in decodes.parameters for start in [vars(alone)[p.name]]
    ]
    parameters = (
        *layers.parameters,
        request_parameter(seconds),
        *decode,
        *kernel,
        *launches.parameters,
    )
    ends = np.cumsum([len(layers.parameters), 1, len(decode), len(kernel)]).tolist()

    def attention(of_decode: Array | list[float], of_kernel: Array | list[float]) -> JointAttention:
        return JointAttention(grid.kernel(kernel, of_kernel), decodes.kernel(of_decode))

    def predict(guesses: Array) -> Array:
        of_layers, [per_request_s], of_decode, of_kernel, of_launches = np.split(guesses, ends)
        requests_s = requests.read(np.hstack([np.zeros_like(per_request_s), per_request_s]))
        device_s = layers.seconds(of_layers) + attention(of_decode, of_kernel).column_seconds(c)
        return launches.at_least(device_s, of_launches) + requests_s

    solution = solve(predict, seconds, parameters, num_starts=1, seed=seed)
    of_layers, [per_request_s], of_decode, of_kernel, of_launches = np.split(solution.values, ends)
    model = LayeredModel(
        layers.build(of_layers),
        request_table(float(per_request_s)),
        attention(of_decode.tolist(), of_kernel.tolist()),
        launches=launches.build(of_launches),
    )
    layer_fits, [request_fit], decode_fits, kernel_fits, launch_fits = parts(
        solution.estimates, ends
    )
    estimates = (
        *named("layers", layer_fits),
        request_fit,
        *named("decode", decode_fits),
        *named("kernel", kernel_fits),
        *launch_fits,
    )
    return with_swap(model, measurements, estimates)
