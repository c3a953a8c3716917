"""The latency model: measurements of steps, the model's forms, their fit, and models to load."""

from slosched.perfmodel.errors import ErrorReport, FitError
from slosched.perfmodel.fit import AUTO, FITTERS, LEARNT, FitReport, fit
from slosched.perfmodel.forms import scaled, with_longer_steps
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
from slosched.perfmodel.server_time import NO_SERVER_TIME, ServerTime
from slosched.perfmodel.store import DEFAULT_MODEL, bundled_models, load_model, save_model
from slosched.perfmodel.swap import (
    at_block_size,
    kv_bytes_per_token,
    swap_cost,
    with_derived_swap,
    with_swap_bandwidth,
)

__all__ = [
    "AUTO",
    "DEFAULT_MODEL",
    "FITTERS",
    "LEARNT",
    "NO_SERVER_TIME",
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
    "ServerTime",
    "at_block_size",
    "bundled_models",
    "fit",
    "kv_bytes_per_token",
    "load_model",
    "read_profile",
    "save_model",
    "scaled",
    "swap_cost",
    "with_derived_swap",
    "with_longer_steps",
    "with_swap_bandwidth",
    "write_profile",
]
