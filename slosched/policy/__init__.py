"""The table of all policies.  A new one is a file here, a line below, and its test."""

from slosched.core import Policy
from slosched.policy.edf import EDF
from slosched.policy.fairbatching import FairBatching
from slosched.policy.fcfs import FCFS
from slosched.policy.jitserve import JITServe
from slosched.policy.medha_lars import MedhaLARS
from slosched.policy.qoserve import QoServe
from slosched.policy.sarathi import Sarathi
from slosched.policy.sjf import SJF
from slosched.policy.slai import SLAI
from slosched.policy.slidebatching import SlideBatching
from slosched.policy.slo_aware import SLOAware
from slosched.policy.slosserve import SLOsServe
from slosched.policy.vtc import VTC

POLICIES: dict[str, type[Policy]] = {
    "fcfs": FCFS,
    "sarathi": Sarathi,
    "edf": EDF,
    "sjf": SJF,
    "slo_aware": SLOAware,
    "qoserve": QoServe,
    "fairbatching": FairBatching,
    "slosserve": SLOsServe,
    "slidebatching": SlideBatching,
    "slai": SLAI,
    "jitserve": JITServe,
    "medha_lars": MedhaLARS,
    "vtc": VTC,
}

__all__ = [
    "EDF",
    "FCFS",
    "POLICIES",
    "SJF",
    "SLAI",
    "VTC",
    "FairBatching",
    "JITServe",
    "MedhaLARS",
    "QoServe",
    "SLOAware",
    "SLOsServe",
    "Sarathi",
    "SlideBatching",
]
