"""Operator times of a GPU without tables, derived from the GPUs with tables.

Each operator takes a launch, and then as many times the least time that the GPU's peaks allow as on
the other GPUs:

    launch + (measured time - launch) · least time here / least time there

The result is the geometric mean over one GPU with tables of each architecture.  How wrong that is,
is measured on these GPUs themselves: each is derived from the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slosched.perfmodel.aiconfigurator.deployment import Deployment
from slosched.perfmodel.aiconfigurator.errors import MissingTablesError
from slosched.perfmodel.aiconfigurator.operators import OperatorTables, OperatorTime
from slosched.perfmodel.aiconfigurator.package import CompiledModel, compile_model, peaks_of
from slosched.perfmodel.errors import ErrorReport, report_errors
from slosched.perfmodel.measurement import Chunk, Measurement
from slosched.perfmodel.peaks import Peaks

REFERENCES = ("h100_sxm", "a100_sxm", "b200_sxm", "l40s", "rtx_pro_6000_server")
"""One GPU with tables of each architecture: Hopper, Ampere, Blackwell, Ada and RTX Blackwell."""
_LAUNCH_MS = 0.003
"""The launch of a kernel: AIConfigurator's constant for the shortest kernels of all its GPUs."""
_TRIED = (((64, 0), (1, 64)), ((1, 64),) * 2)
"""Steps that show whether a GPU has tables of all of a model's operators."""


@dataclass(frozen=True)
class Reference:
    """A GPU with tables of a model."""

    system: str
    compiled: CompiledModel
    peaks: Peaks


def references_of(deployment: Deployment) -> tuple[Reference, ...]:
    """Return the GPUs that have tables of the deployment's model and backend.

    Raises MissingTablesError if fewer than two have.
    """
    found = []
    reasons = []
    for system in REFERENCES:
        try:
            compiled = compile_model(replace(deployment, system=system))
            tables = compiled.tables()
            for chunks in _TRIED:
                tables.step_s(chunks)
        except (MissingTablesError, RuntimeError, ValueError) as error:
            reasons.append(f"{system}: {error}")
        else:
            found.append(Reference(system, compiled, peaks_of(system)))
    if len(found) < 2:
        raise MissingTablesError(
            f"too few GPUs have tables of {deployment.model!r} to derive {deployment.system} from "
            f"them; {'; '.join(reasons)}"
        )
    return tuple(found)


@dataclass(frozen=True)
class DerivedEngine:
    """Times of a model's operators on a GPU with the given peaks."""

    references: tuple[Reference, ...]
    peaks: Peaks
    known: dict[object, float] = field(default_factory=dict)
    """Milliseconds of the operators that were asked for before."""

    def evaluate_context_ops(
        self, indices: list[int], *, batch_size: int, s: int, prefix: int = 0, x: int | None = None
    ) -> list[OperatorTime]:
        shape = {"batch_size": batch_size, "s": s, "prefix": prefix}
        return self._times(indices, True, shape, {"x": x})

    def evaluate_generation_ops(
        self, indices: list[int], *, batch_size: int, s: int
    ) -> list[OperatorTime]:
        return self._times(indices, False, {"batch_size": batch_size, "s": s}, {})

    def _times(
        self,
        indices: list[int],
        is_prefill: bool,
        shape: Mapping[str, int],
        more: Mapping[str, Any],
    ) -> list[OperatorTime]:
        return [
            ("", self._time_ms(index, is_prefill, shape, more), 0.0, "derived") for index in indices
        ]

    def _time_ms(
        self, index: int, is_prefill: bool, shape: Mapping[str, int], more: Mapping[str, Any]
    ) -> float:
        key = (index, is_prefill, *shape.values())
        if key not in self.known:
            self.known[key] = _geometric_mean(
                [
                    _derived_ms(reference, self.peaks, index, is_prefill, shape, more)
                    for reference in self.references
                ]
            )
        return self.known[key]


def _derived_ms(
    reference: Reference,
    peaks: Peaks,
    index: int,
    is_prefill: bool,
    shape: Mapping[str, int],
    more: Mapping[str, Any],
) -> float:
    """Return the time of an operator on a GPU with these peaks, derived from one other GPU."""
    engine, compiled = reference.compiled.engine, reference.compiled
    operator = (compiled.prefill if is_prefill else compiled.decode)[index]
    evaluate = engine.evaluate_context_ops if is_prefill else engine.evaluate_generation_ops
    measured_ms = sum(ms for _, ms, _, _ in evaluate([index], **shape, **more))
    rows = engine.evaluate_ops_sol_json(json.dumps([operator.spec]), is_context=is_prefill, **shape)
    arithmetic_ms = sum(ms for _, _, ms, _ in rows)
    memory_ms = sum(ms for _, _, _, ms in rows)
    there_ms = max(arithmetic_ms, memory_ms)
    if not there_ms:
        return measured_ms
    here_ms = max(
        arithmetic_ms * reference.peaks.flops_per_s / peaks.flops_per_s,
        memory_ms * reference.peaks.bytes_per_s / peaks.bytes_per_s,
    )
    launch_ms = min(measured_ms, _LAUNCH_MS * float(operator.settings.get("scale_factor", 1)))
    return launch_ms + (measured_ms - launch_ms) * here_ms / there_ms


def derived_tables(references: Sequence[Reference], peaks: Peaks) -> OperatorTables:
    """Return the operator times of a GPU with these peaks."""
    engine = DerivedEngine(tuple(references), peaks)
    return replace(references[0].compiled.tables(), engine=engine)


def derivation_error(
    references: Sequence[Reference], batches: Sequence[Sequence[Chunk]]
) -> ErrorReport:
    """Return how wrong the times of all references are if each is derived from the others."""
    derived_s, steps = [], []
    for reference in references:
        others = [other for other in references if other is not reference]
        derived, measured = derived_tables(others, reference.peaks), reference.compiled.tables()
        derived_s += [derived.step_s(batch) for batch in batches]
        steps += [Measurement(tuple(batch), measured.step_s(batch)) for batch in batches]
    return report_errors(np.array(derived_s), steps)


def _geometric_mean(values: Sequence[float]) -> float:
    if min(values) <= 0:
        return 0.0
    return math.exp(sum(math.log(value) for value in values) / len(values))
