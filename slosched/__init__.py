"""slosched: SLO-aware scheduling of LLM inference.

The names that a policy, a replay or a test needs are found here; each is imported when it is first
asked for, so that `import slosched` stays cheap.  Read `slosched.core.plan` first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slosched.batch import BatchBuilder as BatchBuilder
    from slosched.core import NO_SLO as NO_SLO
    from slosched.core import SLO as SLO
    from slosched.core import BatchShape as BatchShape
    from slosched.core import DeadlineRule as DeadlineRule
    from slosched.core import DecodeGroup as DecodeGroup
    from slosched.core import EndReason as EndReason
    from slosched.core import LatencyModel as LatencyModel
    from slosched.core import Limits as Limits
    from slosched.core import Policy as Policy
    from slosched.core import PreemptionMode as PreemptionMode
    from slosched.core import Request as Request
    from slosched.core import SchedulerOutput as SchedulerOutput
    from slosched.core import SchedulerView as SchedulerView
    from slosched.core import tunable as tunable
    from slosched.evaluate.comparison import Replica as Replica
    from slosched.evaluate.comparison import compare as compare
    from slosched.metrics import RequestRecord as RequestRecord
    from slosched.metrics import Summary as Summary
    from slosched.metrics import summarize as summarize
    from slosched.perfmodel import load_model as load_model
    from slosched.policy import POLICIES as POLICIES
    from slosched.policy import WRAPPERS as WRAPPERS
    from slosched.policy.kit import DecodeFirst as DecodeFirst
    from slosched.policy.kit import Gate as Gate
    from slosched.policy.kit import Wrapper as Wrapper
    from slosched.policy.kit import reject_expired as reject_expired
    from slosched.policy.kit import reject_hopeless as reject_hopeless
    from slosched.policy.spec import make_policy as make_policy
    from slosched.simulator.simulate import SimulationConfig as SimulationConfig
    from slosched.simulator.simulate import simulate as simulate
    from slosched.testing import check_policy as check_policy
    from slosched.workload import Trace as Trace
    from slosched.workload import TraceRequest as TraceRequest
    from slosched.workload import read_trace as read_trace
    from slosched.workload import synthesize as synthesize

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "slosched.batch": ("BatchBuilder",),
    "slosched.core": (
        "NO_SLO",
        "SLO",
        "BatchShape",
        "DeadlineRule",
        "DecodeGroup",
        "EndReason",
        "LatencyModel",
        "Limits",
        "Policy",
        "PreemptionMode",
        "Request",
        "SchedulerOutput",
        "SchedulerView",
        "tunable",
    ),
    "slosched.evaluate.comparison": ("Replica", "compare"),
    "slosched.metrics": ("RequestRecord", "Summary", "summarize"),
    "slosched.perfmodel": ("load_model",),
    "slosched.policy": ("POLICIES", "WRAPPERS"),
    "slosched.policy.kit": (
        "DecodeFirst",
        "Gate",
        "Wrapper",
        "reject_expired",
        "reject_hopeless",
    ),
    "slosched.policy.spec": ("make_policy",),
    "slosched.simulator.simulate": ("SimulationConfig", "simulate"),
    "slosched.testing": ("check_policy",),
    "slosched.workload": ("Trace", "TraceRequest", "read_trace", "synthesize"),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = sorted(_MODULES)  # the names above, each once


def __getattr__(name: str) -> object:
    """Import the module that has `name`.  Raises AttributeError if no module has it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'slosched' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    """List the names that can be imported from here, for completion in a shell."""
    return sorted({*globals(), *_MODULES})
