"""The table of all policies.  A new one is a file here, a line below, and its test."""

from slosched.core import Policy
from slosched.policy.early_rejection import EarlyRejection
from slosched.policy.edf import EDF
from slosched.policy.fairbatching import FairBatching
from slosched.policy.fcfs import FCFS
from slosched.policy.goodput import Goodput
from slosched.policy.jitserve import JITServe
from slosched.policy.medha_lars import MedhaLARS
from slosched.policy.past_future import PastFuture
from slosched.policy.qoserve import QoServe
from slosched.policy.sarathi import Sarathi
from slosched.policy.scorpio import Scorpio
from slosched.policy.sglang import SGLang
from slosched.policy.sjf import SJF
from slosched.policy.slai import SLAI
from slosched.policy.slidebatching import SlideBatching
from slosched.policy.slo_aware import SLOAware
from slosched.policy.slosserve import SLOsServe
from slosched.policy.sola import SOLA
from slosched.policy.trtllm import TRTLLM
from slosched.policy.vllm_v0 import VLLMV0
from slosched.policy.vllm_v1 import VLLMV1
from slosched.policy.vtc import VTC
from slosched.policy.wrapper import Wrapper

POLICIES: dict[str, type[Policy]] = {
    "fcfs": FCFS,
    "sarathi": Sarathi,
    "edf": EDF,
    "sjf": SJF,
    "slo_aware": SLOAware,
    "goodput": Goodput,
    "qoserve": QoServe,
    "fairbatching": FairBatching,
    "slidebatching": SlideBatching,
    "slai": SLAI,
    "slosserve": SLOsServe,
    "jitserve": JITServe,
    "medha_lars": MedhaLARS,
    "vtc": VTC,
    "scorpio": Scorpio,
    "sola": SOLA,
    "vllm_v0": VLLMV0,
    "vllm_v1": VLLMV1,
    "trtllm": TRTLLM,
    "sglang": SGLang,
}

WRAPPERS: dict[str, type[Wrapper]] = {
    "early_rejection": EarlyRejection,
    "past_future": PastFuture,
}
"""What can stand around any of them."""

__all__ = [
    "EDF",
    "FCFS",
    "POLICIES",
    "SJF",
    "SLAI",
    "SOLA",
    "TRTLLM",
    "VLLMV0",
    "VLLMV1",
    "VTC",
    "WRAPPERS",
    "EarlyRejection",
    "FairBatching",
    "Goodput",
    "JITServe",
    "MedhaLARS",
    "PastFuture",
    "QoServe",
    "SGLang",
    "SLOAware",
    "SLOsServe",
    "Sarathi",
    "Scorpio",
    "SlideBatching",
    "Wrapper",
]
