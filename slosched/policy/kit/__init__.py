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
| `UrgencyQueue` | all requests of a step by slack, and how many a prefill would delay |
| `PromptPack` | adds prefill chunks until one has to be cut, to whole tiles |
| `give_way` | fills a step with the decodes that are due, then prompts and the others |
| `num_in_time`, `add_without_preempting` | serve only the decodes for which there is time |
| `plan_turn` | a whole step in which chosen requests come first |
| `least_urgent_last` | who gives up KV blocks first: the one that is furthest ahead |
| `has_to_make_way`, `make_way`, `with_way_made` | preempt what can wait where prompts lack room |
| `come_back` | leaves out what would only have to make way again |
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
| `Remaining` | waiting requests without some of them, not copied |

| about the future | what it knows |
|---|---|
| `Deadlines` | when tokens are due by another rule than the run's |
| `OutputLengths` | output tokens still to come, learnt from finished requests |
| `Supply`, `most_in_time`, `best_order` | the prompts that can be in time one after the other |
| `Pace` | what decodes ask of every step |
| `Chunk`, `chunks_beside` | what a prompt's tokens add to a step of decodes |
| `LongSteps`, `long_steps` | steps longer than a TPOT, where they let prompts go faster |
| `LateGaps`, `starving_tpot_s` | gaps that may be late, for prompts that a TPOT leaves no time |
| `tokens_in_turn`, `tokens_at_leisure` | prompt tokens of a step while KV blocks are short |
| `Stays` | how many tokens requests emit, learnt also from those that go on |
| `is_flooded`, `in_turn_for_blocks` | who gets KV blocks when more prompts come than have room |
| `Quoter` | the `Quote` of a request: its TTFT and TPOT if it came now |
| `Speed` | what is done in a second, over several times past |
| `Worth` | the smallest TPOT that is worth keeping when not all prompts can be in time |
| `Drift`, `CorrectedModel` | the bias of a latency model that does not learn it |
| `num_lost` | decodes that miss their SLO whatever comes |
| `Spread` | quantiles of what came over what was expected |

`check_at_least`, `check_positive`, `check_part`, `check_share` and `check_positive_share` raise
ValueError for an option out of range.
"""

from slosched.batch import largest_that_fits as largest_that_fits
from slosched.policy.kit.checks import check_at_least as check_at_least
from slosched.policy.kit.checks import check_part as check_part
from slosched.policy.kit.checks import check_positive as check_positive
from slosched.policy.kit.checks import check_positive_share as check_positive_share
from slosched.policy.kit.checks import check_share as check_share
from slosched.policy.kit.chunks import Chunk as Chunk
from slosched.policy.kit.chunks import chunks_beside as chunks_beside
from slosched.policy.kit.deadlines import Deadlines as Deadlines
from slosched.policy.kit.decode_first import DecodeFirst as DecodeFirst
from slosched.policy.kit.decode_first import StallFree as StallFree
from slosched.policy.kit.decode_first import add_decodes as add_decodes
from slosched.policy.kit.decode_first import add_prefills as add_prefills
from slosched.policy.kit.decode_first import decodes_until_s as decodes_until_s
from slosched.policy.kit.decode_first import may_start_new as may_start_new
from slosched.policy.kit.decode_first import split_running as split_running
from slosched.policy.kit.deferred import add_without_preempting as add_without_preempting
from slosched.policy.kit.deferred import all_in_time as all_in_time
from slosched.policy.kit.deferred import are_alone as are_alone
from slosched.policy.kit.deferred import num_in_time as num_in_time
from slosched.policy.kit.deferred import serve_something as serve_something
from slosched.policy.kit.drift import CorrectedModel as CorrectedModel
from slosched.policy.kit.drift import Drift as Drift
from slosched.policy.kit.drop import Drop as Drop
from slosched.policy.kit.drop import drop_late as drop_late
from slosched.policy.kit.drop import reject_expired as reject_expired
from slosched.policy.kit.drop import reject_hopeless as reject_hopeless
from slosched.policy.kit.drop import why_late as why_late
from slosched.policy.kit.drop import without_rejected as without_rejected
from slosched.policy.kit.giving_way import give_way as give_way
from slosched.policy.kit.late_gaps import LateGaps as LateGaps
from slosched.policy.kit.late_gaps import starving_tpot_s as starving_tpot_s
from slosched.policy.kit.lengths import OutputLengths as OutputLengths
from slosched.policy.kit.long_steps import LongSteps as LongSteps
from slosched.policy.kit.long_steps import long_steps as long_steps
from slosched.policy.kit.lost import num_lost as num_lost
from slosched.policy.kit.make_way import come_back as come_back
from slosched.policy.kit.make_way import has_to_make_way as has_to_make_way
from slosched.policy.kit.make_way import make_way as make_way
from slosched.policy.kit.make_way import with_way_made as with_way_made
from slosched.policy.kit.memory import tokens_at_leisure as tokens_at_leisure
from slosched.policy.kit.memory import tokens_in_turn as tokens_in_turn
from slosched.policy.kit.pace import Pace as Pace
from slosched.policy.kit.pausing import in_turn_for_blocks as in_turn_for_blocks
from slosched.policy.kit.pausing import is_flooded as is_flooded
from slosched.policy.kit.pausing import least_urgent_last as least_urgent_last
from slosched.policy.kit.prompt_pack import PromptPack as PromptPack
from slosched.policy.kit.punctual import Supply as Supply
from slosched.policy.kit.punctual import best_order as best_order
from slosched.policy.kit.punctual import most_in_time as most_in_time
from slosched.policy.kit.quotes.expected import Quote as Quote
from slosched.policy.kit.quotes.quoter import Quoter as Quoter
from slosched.policy.kit.quotes.speed import Speed as Speed
from slosched.policy.kit.quotes.spread import Spread as Spread
from slosched.policy.kit.remaining import Remaining as Remaining
from slosched.policy.kit.stays import Stays as Stays
from slosched.policy.kit.turn import plan_turn as plan_turn
from slosched.policy.kit.worth import Worth as Worth
from slosched.policy.kit.wrapper import Gate as Gate
from slosched.policy.kit.wrapper import Wrapper as Wrapper
