"""The error of step times that were derived, carried from the profile to the model."""

from __future__ import annotations

import json

from slosched.perfmodel.errors import ErrorReport
from slosched.perfmodel.forms import described
from slosched.perfmodel.model import FittedModel

DERIVATION_ERROR = "derivation_error"
"""The provenance's key for how wrong the derivation is, in percent, as JSON."""


def error_text(error: ErrorReport) -> str:
    """Return the value of `DERIVATION_ERROR`."""
    names = ("count", "mape", "p99", "under_p99")
    return json.dumps({name: round(float(getattr(error, name)), 2) for name in names})


def with_derivation_error(model: FittedModel) -> FittedModel:
    """Return the model with the error of the derivation as its held-out error.

    A form that fits derived steps well says nothing of how wrong these steps are.  A model of
    measured steps is returned unchanged.
    """
    said = model.provenance.get(DERIVATION_ERROR)
    if said is None:
        return model
    fitted = {name: value for name, value in model.held_out_error.items() if name == "fitted"}
    return described(model, model.provenance, {**json.loads(said), **fitted})
