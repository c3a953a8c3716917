"""The latency model: measurements of steps, the model's forms, their fit, and models to load."""

from slosched.perfmodel.errors import ErrorReport, FitError
from slosched.perfmodel.fit import AUTO, FITTERS, FitReport, fit
from slosched.perfmodel.forms import scaled
from slosched.perfmodel.layered import LayeredModel
from slosched.perfmodel.linear import AttentionWork, LinearCoefficients, LinearModel
from slosched.perfmodel.measurement import (
    Measurement,
    Part,
    Profile,
    read_profile,
    write_profile,
)
from slosched.perfmodel.model import FittedModel
from slosched.perfmodel.online import OnlineModel
from slosched.perfmodel.store import DEFAULT_MODEL, bundled_models, load_model, save_model
from slosched.perfmodel.swap import at_block_size, swap_cost, with_derived_swap, with_swap_bandwidth

__all__ = [
    "AUTO",
    "DEFAULT_MODEL",
    "FITTERS",
    "AttentionWork",
    "ErrorReport",
    "FitError",
    "FitReport",
    "FittedModel",
    "LayeredModel",
    "LinearCoefficients",
    "LinearModel",
    "Measurement",
    "OnlineModel",
    "Part",
    "Profile",
    "at_block_size",
    "bundled_models",
    "fit",
    "load_model",
    "read_profile",
    "save_model",
    "scaled",
    "swap_cost",
    "with_derived_swap",
    "with_swap_bandwidth",
    "write_profile",
]
