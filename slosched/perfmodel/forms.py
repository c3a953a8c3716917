"""The forms by name: build models from parameters, and give the same device other times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from slosched.perfmodel.layered import layered_from
from slosched.perfmodel.linear import linear_from
from slosched.perfmodel.model import FittedModel

READERS: Mapping[str, Callable[..., FittedModel]] = {
    "linear": linear_from,
    "linear-literal": linear_from,
    "roofline": layered_from,
    "profiled-separate": layered_from,
    "experts-separate": layered_from,
    "profiled-joint": layered_from,
    "experts-joint": layered_from,
}
"""For each form, the function that makes a model from its `parameters()`."""


def scaled(model: FittedModel, factor: float) -> FittedModel:
    """Return a model of the same device when it is `factor` times as slow."""
    return READERS[model.form](
        _scale(model.parameters(), factor),
        provenance={**model.provenance, "scaled_by": f"{factor:.4g}"},
        held_out_error=model.held_out_error,
    )


def described(
    model: FittedModel, provenance: Mapping[str, str], held_out_error: Mapping[str, float]
) -> FittedModel:
    """Return the same model with this provenance and this held-out error."""
    return READERS[model.form](
        model.parameters(), provenance=provenance, held_out_error=held_out_error
    )


def with_swapped_block_s(
    model: FittedModel, seconds: float, provenance: Mapping[str, str]
) -> FittedModel:
    """Return the same model with another time for each KV block that is swapped."""
    parameters = model.parameters()
    parameters.get("coefficients", parameters)["per_swapped_block_s"] = seconds
    return READERS[model.form](
        parameters, provenance=provenance, held_out_error=model.held_out_error
    )


def _scale(values: dict[str, Any], factor: float) -> dict[str, Any]:
    """Multiply every time by the factor; times are the values whose names end with `_s`."""

    def times(value: object) -> object:
        if isinstance(value, (list, tuple)):
            return [times(v) for v in value]
        return factor * cast("float", value)

    return {
        key: _scale(value, factor)
        if isinstance(value, dict)
        else times(value)
        if key.endswith("_s")
        else value
        for key, value in values.items()
    }
