"""The forms by name: build models from parameters, and give the same device other times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from slosched.perfmodel.boosting import boosted_from
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
    "boosting": boosted_from,
}
"""For each form, the function that makes a model from its `parameters()`."""


def scaled(model: FittedModel, factor: float) -> FittedModel:
    """Return a model of the same device when it is `factor` times as slow.

    What the server adds stays as it is.
    """
    return _rebuilt(
        model,
        _scale(model.parameters(), factor),
        provenance={**model.provenance, "scaled_by": f"{factor:.4g}"},
    )


def described(
    model: FittedModel,
    provenance: Mapping[str, str],
    held_out_error: Mapping[str, float],
    **more: Any,
) -> FittedModel:
    """Return the same model with this provenance and this held-out error.

    `more` are other fields of `FittedModel`: `server_time` and `noise`.
    """
    facts = {"provenance": provenance, "held_out_error": held_out_error, **more}
    return _rebuilt(model, model.parameters(), **facts)


def with_swapped_block_s(
    model: FittedModel, seconds: float, provenance: Mapping[str, str]
) -> FittedModel:
    """Return the same model with another time for each KV block that is swapped."""
    parameters = model.parameters()
    parameters.get("coefficients", parameters)["per_swapped_block_s"] = seconds
    return _rebuilt(model, parameters, provenance=provenance)


def with_longer_steps(model: FittedModel, seconds: float) -> FittedModel:
    """Return a model by which every step that computes a token takes `seconds` longer."""
    if not seconds:
        return model
    parameters = model.parameters()
    if "coefficients" in parameters:
        parameters["coefficients"]["constant_s"] += seconds
    elif "requests" in parameters:
        requests = parameters["requests"]
        requests["times_s"] = tuple(time_s + seconds for time_s in requests["times_s"])
    else:
        parameters["constant_s"] += seconds
    return _rebuilt(model, parameters)


def _rebuilt(model: FittedModel, parameters: dict[str, Any], **facts: Any) -> FittedModel:
    """Return a model of the same form with these parameters, and with `facts` of its own."""
    return READERS[model.form](parameters, **{**model.description(), **facts})


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
