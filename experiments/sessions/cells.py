"""The replays: traffic of agents at the knee of LRU and beyond, on two KV caches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache

from slosched.core import SLO, DeadlineRule, OnInfeasible
from slosched.evaluate.capacity.outcomes import Outcomes
from slosched.kv import Eviction, PrefixCaching
from slosched.metrics import records_of
from slosched.metrics.programs import num_programs_on_time
from slosched.perfmodel import FittedModel, at_block_size, load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Tiers, Trace, synthesize

MODEL = "h100/llama-3.1-8b"
BLOCK_TOKENS = 64
"""As long as a block of the trace's hashes.  Blocks of 16 tokens take three times as long to
simulate."""
NUM_REQUESTS = 1000
"""Of each replay, which are about 16 programs or more."""
SLO_OF_TURNS = SLO(ttft_s=10.0, tpot_s=0.05)
"""A tool's result of 40 thousand tokens after as many others takes seconds to read: a TTFT of 2 s
could not be kept for every turn of an agent even alone on the GPU."""
PROGRAM_FACTOR = 1.0
"""A program's time over the sum of what its turns are promised, and its pauses."""
SEEDS = (10, 11, 12)
"""The orders were designed on seed 0, and what becomes of late turns on 0 to 3."""


@dataclass(frozen=True)
class Cell:
    """A policy, the tokens of its KV cache, and the rate of the traffic in requests/s."""

    policy: str
    kv_tokens: int
    rate: float
    late: OnInfeasible = OnInfeasible.REJECT
    """What becomes of a turn that the policy cannot serve in time, if a turn came before it."""


_LATE = (OnInfeasible.REJECT, OnInfeasible.RELEGATE)
CELLS = (
    Cell("fcfs", 432_992, 0.3),
    Cell("fcfs", 432_992, 0.36),
    Cell("fcfs", 865_984, 0.68),
    *(Cell("goodput", 432_992, 0.3, late) for late in _LATE),
    *(Cell("goodput", 432_992, 0.36, late) for late in _LATE),
    *(Cell("goodput", 432_992, 0.42, late) for late in _LATE),
)
"""The knee of LRU under `fcfs`, which is sharp, lies at 0.3 requests/s with the first cache; 0.36
and 0.42 are beyond it.  The first cache is that of an H100 of 80 GB with 16-bit keys and values,
the second the same with 8."""
EVICTIONS = (Eviction.LRU, Eviction.TTL, Eviction.SAVED_TIME, Eviction.BELADY)


@cache
def _model() -> FittedModel:
    return at_block_size(load_model(MODEL), BLOCK_TOKENS)


def traffic(rate: float, seed: int, late: OnInfeasible, num_requests: int = NUM_REQUESTS) -> Trace:
    """Return sessions of agents with promises for turns and programs."""
    trace = synthesize("agents", num_requests=num_requests, rate=rate, seed=seed)
    promised = trace.with_slo(Tiers((SLO_OF_TURNS,), (1.0,))).with_program_deadlines(
        0.0, PROGRAM_FACTOR
    )
    return promised if late is OnInfeasible.RELEGATE else promised.with_on_infeasible(late)


def play(cell: Cell, eviction: Eviction, seed: int) -> Mapping[Hashable, object]:
    """Replay a cell under an order of eviction, and return a row of results."""
    config = SimulationConfig(
        num_blocks=cell.kv_tokens // BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
        prefix_cache=PrefixCaching.HASH,
        eviction=eviction,
    )
    trace = traffic(cell.rate, seed, cell.late)
    requests = simulate(trace, make_policy(cell.policy), _model(), config)
    records = defaultdict(list)
    for record in records_of(requests, DeadlineRule.MEAN_TPOT):
        records[record.session_id].append(record)
    outcomes = [num_programs_on_time(records[name])[0] for name in sorted(records, key=_number)]
    started = [request for request in requests if request.started_s is not None]
    prompts = sum(request.num_prompt_tokens for request in started)
    cached = sum(request.num_cached_tokens for request in started)
    return {
        "policy": cell.policy,
        "kv_tokens": cell.kv_tokens,
        "rate": cell.rate,
        "late": str(cell.late),
        "eviction": str(eviction),
        "seed": seed,
        "on_time": "".join("01"[is_on_time] for is_on_time in outcomes),
        "turns_in_time": round(Outcomes.of(requests, DeadlineRule.MEAN_TPOT).attainment, 5),
        "prompt_tokens": prompts,
        "computed_tokens": prompts - cached,
    }


def _number(session_id: str | None) -> int:
    assert session_id is not None
    return int(session_id)
