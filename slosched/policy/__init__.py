"""The table of all policies.  A new policy is a file here, a line below, and its test."""

from slosched.core import Policy
from slosched.policy.door import Door
from slosched.policy.edf import EDF
from slosched.policy.engines.sglang.policy import SGLang
from slosched.policy.engines.trtllm.policy import TRTLLM
from slosched.policy.engines.vllm_v0.policy import VLLMV0
from slosched.policy.engines.vllm_v1.policy import VLLMV1
from slosched.policy.fcfs import FCFS
from slosched.policy.floors import Floors
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.wrapper import Wrapper
from slosched.policy.portfolio.policy import Portfolio
from slosched.policy.proposed.vllm_cost_aware import VLLMCostAware
from slosched.policy.proposed.vllm_lcf import VLLMLeastComputedFirst
from slosched.policy.proposed.vllm_ppas import VLLMPPAS
from slosched.policy.proposed.vllm_residual_sjf import VLLMResidualSJF
from slosched.policy.proposed.vllm_slo import VLLMSLO
from slosched.policy.published.early_rejection import EarlyRejection
from slosched.policy.published.fairbatching import FairBatching
from slosched.policy.published.jitserve import JITServe
from slosched.policy.published.medha_lars import MedhaLARS
from slosched.policy.published.past_future import PastFuture
from slosched.policy.published.qoserve import QoServe
from slosched.policy.published.scorpio import Scorpio
from slosched.policy.published.slai import SLAI
from slosched.policy.published.slidebatching import SlideBatching
from slosched.policy.published.slo_aware_literal import SLOAwareLiteral
from slosched.policy.published.slosserve.policy import SLOsServe
from slosched.policy.published.sola import SOLA
from slosched.policy.published.vtc import VTC
from slosched.policy.sarathi import Sarathi
from slosched.policy.sjf import SJF
from slosched.policy.slo_aware import SLOAware

POLICIES: dict[str, type[Policy]] = {
    "fcfs": FCFS,
    "sarathi": Sarathi,
    "edf": EDF,
    "sjf": SJF,
    "slo_aware": SLOAware,
    "slo_aware_literal": SLOAwareLiteral,
    "goodput": Goodput,
    "portfolio": Portfolio,
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
    "vllm_lcf": VLLMLeastComputedFirst,
    "vllm_cost_aware": VLLMCostAware,
    "vllm_ppas": VLLMPPAS,
    "vllm_residual_sjf": VLLMResidualSJF,
    "vllm_slo": VLLMSLO,
    "trtllm": TRTLLM,
    "sglang": SGLang,
}

WRAPPERS: dict[str, type[Wrapper]] = {
    "early_rejection": EarlyRejection,
    "past_future": PastFuture,
    "floors": Floors,
    "door": Door,
}
"""The wrappers that can be put around any policy."""

__all__ = [
    "EDF",
    "FCFS",
    "POLICIES",
    "SJF",
    "SLAI",
    "SOLA",
    "TRTLLM",
    "VLLMPPAS",
    "VLLMSLO",
    "VLLMV0",
    "VLLMV1",
    "VTC",
    "WRAPPERS",
    "Door",
    "EarlyRejection",
    "FairBatching",
    "Floors",
    "Goodput",
    "JITServe",
    "MedhaLARS",
    "PastFuture",
    "Portfolio",
    "QoServe",
    "SGLang",
    "SLOAware",
    "SLOAwareLiteral",
    "SLOsServe",
    "Sarathi",
    "Scorpio",
    "SlideBatching",
    "VLLMCostAware",
    "VLLMLeastComputedFirst",
    "VLLMResidualSJF",
    "Wrapper",
]
