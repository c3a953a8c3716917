"""The words of slosched: every noun and every protocol, and nothing that acts.

All times are seconds on one clock.  This package knows no clock, no queue and no tensor, and it
imports nothing else of ours.
"""

from slosched.core.decode_group import DecodeGroup
from slosched.core.errors import IllegalPlanError, SloschedError, StalledError
from slosched.core.kv import BlockLedger, BlockNames, KVView
from slosched.core.plan import (
    TRIED,
    Limits,
    Policy,
    PreemptionMode,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.core.request import (
    NO_SLO,
    PLACEHOLDER,
    SLO,
    DeadlineRule,
    EndReason,
    Request,
    RequestStatus,
    SamplingParams,
)
from slosched.core.shape import ATTENTION_TILE_TOKENS, BatchShape, LatencyModel
from slosched.core.step import (
    BlockCopy,
    Clock,
    Executor,
    ScheduledBatch,
    ScheduledChunk,
    StepResult,
)

__all__ = [
    "ATTENTION_TILE_TOKENS",
    "NO_SLO",
    "PLACEHOLDER",
    "SLO",
    "TRIED",
    "BatchShape",
    "BlockCopy",
    "BlockLedger",
    "BlockNames",
    "Clock",
    "DeadlineRule",
    "DecodeGroup",
    "EndReason",
    "Executor",
    "IllegalPlanError",
    "KVView",
    "LatencyModel",
    "Limits",
    "Policy",
    "PreemptionMode",
    "Request",
    "RequestStatus",
    "SamplingParams",
    "ScheduledBatch",
    "ScheduledChunk",
    "SchedulerOutput",
    "SchedulerView",
    "SloschedError",
    "StalledError",
    "StepResult",
    "tunable",
]
