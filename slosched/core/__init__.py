"""The words of slosched: every noun and every protocol that its parts share.

To write a policy, read two files: `plan.py` says what a policy is shown and what it decides, and
`request.py` what a request is.  Read on when you need it:

* `kv.py`: the KV cache as a policy sees it, and what a plan would do to its free blocks.
* `waiting.py`: what a policy may ask about all that wait at once.
* `shape.py`: the sums on which the time of a step depends, and the latency model that predicts it.
* `options.py`: what the fields of a policy tell the command line, as `tunable` does.
* `decode_group.py`: what a policy may add so that its replays run several times as fast.
* `door.py`: what a policy may add to refuse requests on arrival.
* `grammar.py`: what an engine must know of an output that has to follow a grammar.
* `drafts.py`: what a policy is told when it chooses draft tokens, with speculative decoding.
* `step.py`: an accepted plan on its way through an executor, for those who write an engine.

All times are seconds on one clock.  Nothing here decides, waits or computes on a device, with one
exception: `BatchShape` adds requests up.  This package imports no other part of slosched.
"""

from slosched.core.decode_group import (
    DecodeGroup,
    ForeseesDecodes,
    PlansBesideDecodes,
    foreseer,
    group_shape,
    planner_beside,
)
from slosched.core.door import Doorkeeper, Refusal
from slosched.core.drafts import DraftOffer
from slosched.core.errors import (
    AdapterError,
    IllegalPlanError,
    OperationError,
    SloschedError,
    StalledError,
)
from slosched.core.grammar import GrammarError, GrammarState, OutputGrammar
from slosched.core.kv import BlockLedger, KVView
from slosched.core.options import HEEDED, TRIED, heeding, tunable
from slosched.core.plan import (
    Limits,
    Policy,
    PreemptionMode,
    PromptOrder,
    SchedulerOutput,
    SchedulerView,
)
from slosched.core.request import (
    MAX_LATE_GAP_SHARE,
    NO_SLO,
    PLACEHOLDER,
    SLO,
    TOLERANCE_S,
    DeadlineRule,
    EndReason,
    OnInfeasible,
    Request,
    RequestGroup,
    RequestStatus,
    SamplingParams,
    fan_out,
)
from slosched.core.shape import ATTENTION_TILE_TOKENS, BatchShape, LatencyModel
from slosched.core.step import (
    NO_BLOCK,
    BlockCopy,
    Clock,
    DeviceCopy,
    Executor,
    PromptLogprobs,
    ScheduledBatch,
    ScheduledChunk,
    StepResult,
    TokenLogprobs,
)
from slosched.core.waiting import WaitingRequests, due_by, latest_first, longest_tokens

__all__ = [
    "ATTENTION_TILE_TOKENS",
    "HEEDED",
    "MAX_LATE_GAP_SHARE",
    "NO_BLOCK",
    "NO_SLO",
    "PLACEHOLDER",
    "SLO",
    "TOLERANCE_S",
    "TRIED",
    "AdapterError",
    "BatchShape",
    "BlockCopy",
    "BlockLedger",
    "Clock",
    "DeadlineRule",
    "DecodeGroup",
    "DeviceCopy",
    "Doorkeeper",
    "DraftOffer",
    "EndReason",
    "Executor",
    "ForeseesDecodes",
    "GrammarError",
    "GrammarState",
    "IllegalPlanError",
    "KVView",
    "LatencyModel",
    "Limits",
    "OnInfeasible",
    "OperationError",
    "OutputGrammar",
    "PlansBesideDecodes",
    "Policy",
    "PreemptionMode",
    "PromptLogprobs",
    "PromptOrder",
    "Refusal",
    "Request",
    "RequestGroup",
    "RequestStatus",
    "SamplingParams",
    "ScheduledBatch",
    "ScheduledChunk",
    "SchedulerOutput",
    "SchedulerView",
    "SloschedError",
    "StalledError",
    "StepResult",
    "TokenLogprobs",
    "WaitingRequests",
    "due_by",
    "fan_out",
    "foreseer",
    "group_shape",
    "heeding",
    "latest_first",
    "longest_tokens",
    "planner_beside",
    "tunable",
]
