"""Step times composed from NVIDIA AIConfigurator's measured operator tables.

The tables come with the package `aiconfigurator-core`, an optional extra of slosched.
"""

from slosched.perfmodel.aiconfigurator.compose import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    compose_profile,
)
from slosched.perfmodel.aiconfigurator.deployment import Deployment, system_of
from slosched.perfmodel.aiconfigurator.derive import derive_profile
from slosched.perfmodel.aiconfigurator.errors import (
    ConfigMissingError,
    MissingTablesError,
    NoRoomError,
)
from slosched.perfmodel.aiconfigurator.operators import OperatorTables, OperatorTime
from slosched.perfmodel.aiconfigurator.package import VERSION, config_folder
from slosched.perfmodel.aiconfigurator.sampling import asks_for_top_p
from slosched.perfmodel.aiconfigurator.unmeasured import UNMEASURED

__all__ = [
    "MAX_NUM_BATCHED_TOKENS",
    "MAX_NUM_SEQS",
    "UNMEASURED",
    "VERSION",
    "ConfigMissingError",
    "Deployment",
    "MissingTablesError",
    "NoRoomError",
    "OperatorTables",
    "OperatorTime",
    "asks_for_top_p",
    "compose_profile",
    "config_folder",
    "derive_profile",
    "system_of",
]
