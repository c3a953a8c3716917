"""How long a step takes: measurements, the formula, its fit, and models to load."""

from slosched.perfmodel.fit import FitReport, fit_linear
from slosched.perfmodel.linear import AttentionWork, LinearCoefficients, LinearModel
from slosched.perfmodel.measurement import Measurement, Profile, read_profile, write_profile
from slosched.perfmodel.online import OnlineModel
from slosched.perfmodel.store import DEFAULT_MODEL, bundled_models, load_model, save_model

__all__ = [
    "DEFAULT_MODEL",
    "AttentionWork",
    "FitReport",
    "LinearCoefficients",
    "LinearModel",
    "Measurement",
    "OnlineModel",
    "Profile",
    "bundled_models",
    "fit_linear",
    "load_model",
    "read_profile",
    "save_model",
    "write_profile",
]
