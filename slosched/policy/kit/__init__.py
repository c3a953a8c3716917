"""The parts that policies are made of; `from slosched.policy.kit import …` has all of them.

| to write | take |
|---|---|
| another order of prefills | `DecodeFirst`: write `prefill_order` |
| another choice of prefill chunks | `StallFree`: write `add_prompts`, with `add_prefills` say |
| something in front of any policy | `Wrapper`: write `gate`, which returns a `Gate` |

| in a `schedule` of your own | what it does |
|---|---|
| `split_running` | separates the decodes from the prompts that have begun |
| `add_decodes` | adds a token of every decode and brings swapped requests back |
| `may_start_new` | the second half of it: brings swapped requests back, if nothing was preempted |
| `add_prefills` | adds prefill chunks in your order; keeps KV blocks for prompts that have begun |
| `PromptPack` | adds prefill chunks until one has to be cut, to whole tiles |
| `num_in_time`, `add_without_preempting` | serve only the decodes for which there is time |
| `serve_something` | runs a step although nothing can be in time |
| `largest_that_fits` | finds the largest number that fits, by bisection |
| `decodes_until_s`, `are_alone`, `all_in_time` | answers for a fast replay (`schedule_beside`) |

| rejecting requests | which |
|---|---|
| `Drop`, `drop_late` | an option of every baseline: never, if expired, if infeasible |
| `reject_expired` | those whose TTFT deadline has passed |
| `reject_hopeless` | those that would miss it even alone on the device |
| `why_late` | the `EndReason` of a request that cannot meet its TTFT |
| `without_rejected` | the view without the requests that the step rejects |

| about the future | what it knows |
|---|---|
| `Deadlines` | when tokens are due by another rule than the run's |
| `OutputLengths` | output tokens still to come, learnt from finished requests |
| `Supply`, `most_in_time`, `best_order` | the prompts that can be in time one after the other |
| `Pace` | what decodes ask of every step |

| checks of options | raise ValueError unless |
|---|---|
| `check_at_least`, `check_positive`, `check_share` | it is large enough; positive; in [0, 1) |
"""

from slosched.batch import largest_that_fits
from slosched.policy.kit.checks import check_at_least, check_positive, check_share
from slosched.policy.kit.deadlines import Deadlines
from slosched.policy.kit.decode_first import (
    DecodeFirst,
    StallFree,
    add_decodes,
    add_prefills,
    decodes_until_s,
    may_start_new,
    split_running,
)
from slosched.policy.kit.deferred import (
    add_without_preempting,
    all_in_time,
    are_alone,
    num_in_time,
    serve_something,
)
from slosched.policy.kit.drop import (
    Drop,
    drop_late,
    reject_expired,
    reject_hopeless,
    why_late,
    without_rejected,
)
from slosched.policy.kit.lengths import OutputLengths
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.policy.kit.punctual import Supply, best_order, most_in_time
from slosched.policy.kit.wrapper import Gate, Wrapper

__all__ = [
    "Deadlines",
    "DecodeFirst",
    "Drop",
    "Gate",
    "OutputLengths",
    "Pace",
    "PromptPack",
    "StallFree",
    "Supply",
    "Wrapper",
    "add_decodes",
    "add_prefills",
    "add_without_preempting",
    "all_in_time",
    "are_alone",
    "best_order",
    "check_at_least",
    "check_positive",
    "check_share",
    "decodes_until_s",
    "drop_late",
    "largest_that_fits",
    "may_start_new",
    "most_in_time",
    "num_in_time",
    "reject_expired",
    "reject_hopeless",
    "serve_something",
    "split_running",
    "why_late",
    "without_rejected",
]
