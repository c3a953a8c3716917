"""The hypothesis strategies that draw random scenarios, and the settings of a search.

Every number is drawn from a range of fewer than a hundred. Into wider ranges, hypothesis mixes
constants of the imported modules, and a seed would not always give the same scenarios.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from slosched.core import NO_SLO, SLO, DeadlineRule, Limits, PreemptionMode
from slosched.kv import NO_PREFIX_HOST, HostWrites, PrefixCaching, PrefixHost
from slosched.simulator.disturbances import UNDISTURBED, Disturbances
from slosched.testing.scenario import TICK_S, Scenario, ScenarioRequest

_TIGHT_MODES = (None, None, *(3 * [PreemptionMode.SWAP]), PreemptionMode.RECOMPUTE)
_ALL_DISTURBANCES = Disturbances(0.1, 0.2, tail=0.1, stall_s=64 * TICK_S, stall_every_s=0.25)


def search(max_examples: int, *, shrink: bool) -> settings:
    """Return how hypothesis looks for a scenario that breaks a law; the caller gives the seed."""
    return settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def scenarios(draw: st.DrawFn, max_requests: int = 12) -> Scenario:
    """Draw a random scenario; many of them are short of KV blocks, seats, tokens or time.

    In two of three, the KV cache is too small for the outputs of the requests that run together. In
    most of these, preempted requests are swapped out, and host memory has room for them.
    """
    tight_mode = draw(st.sampled_from(_TIGHT_MODES))
    is_tight = tight_mode is not None
    prefix_cache = draw(st.sampled_from(PrefixCaching))
    max_tokens = draw(st.integers(min_value=12 if is_tight else 1, max_value=24))
    requests = draw(_requests(max_requests, max_tokens, prefix_cache, is_tight=is_tight))
    block_size = draw(st.sampled_from((1, 4, 16)))
    longest = -(-(max(r.num_prompt_tokens for r in requests) + max_tokens) // block_size)
    host_sizes = (8 * longest,) if is_tight else (0, longest, 8 * longest)
    return Scenario(
        requests=requests,
        num_blocks=draw(_num_blocks(longest, is_tight=is_tight)),
        block_size=block_size,
        num_host_blocks=draw(st.sampled_from(host_sizes)),
        limits=draw(_limits(longest, tight_mode)),
        max_tokens=max_tokens,
        prefix_cache=prefix_cache,
        prefix_host=draw(prefix_hosts(longest, prefix_cache)),
        prefix_block_tokens=draw(st.sampled_from((8, 10, 16))),
        disturbances=draw(st.sampled_from((UNDISTURBED, _ALL_DISTURBANCES))),
        overlap=draw(st.booleans()),
    )


@st.composite
def group_scenarios(draw: st.DrawFn) -> Scenario:
    """Draw a random scenario in which most prompts are answered several times."""
    scenario = draw(scenarios(max_requests=6))
    wanted = [draw(st.sampled_from((1, 2, 2, 3, 5))) for _ in scenario.requests]
    requests = (replace(r, n=n) for r, n in zip(scenario.requests, wanted, strict=True))
    return replace(scenario, requests=tuple(requests))


@st.composite
def _requests(
    draw: st.DrawFn,
    max_requests: int,
    max_tokens: int,
    prefix_cache: PrefixCaching,
    *,
    is_tight: bool,
) -> tuple[ScenarioRequest, ...]:
    ttft_s = st.integers(min_value=1, max_value=64).map(lambda n: 16 * n * TICK_S)
    tpot_s = st.integers(min_value=1, max_value=64).map(lambda n: 2 * n * TICK_S)
    slos = st.builds(SLO, ttft_s, tpot_s)
    longest_gap = 8 if is_tight else 64
    gap_s = st.just(0.0) | st.integers(1, longest_gap).map(lambda n: n * TICK_S)
    aborts = st.none() | st.integers(min_value=0, max_value=30)
    # Few different hashes, so that most requests share a prefix with another.
    hashes = st.lists(st.integers(0, 1), max_size=0 if prefix_cache is PrefixCaching.OFF else 6)
    are_kept = st.booleans() if is_tight else st.just(False)
    arrival_s = 0.0
    requests = []
    for _ in range(draw(st.integers(min_value=3 if is_tight else 1, max_value=max_requests))):
        arrival_s += draw(gap_s)
        requests.append(
            ScenarioRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=draw(st.integers(1, 16 if is_tight else 48)),
                num_output_tokens=draw(st.integers(max_tokens // 2 if is_tight else 1, max_tokens)),
                slo=draw(st.just(NO_SLO) | slos | slos),
                abort_at_step=None if draw(are_kept) else draw(aborts),
                prefix_hashes=tuple(draw(hashes)),
            )
        )
    return tuple(requests)


def _num_blocks(longest: int, *, is_tight: bool) -> st.SearchStrategy[int]:
    """Draw a number of KV blocks, from just too few for the longest request to enough for three."""
    if is_tight:
        return st.integers(longest, longest + longest // 4)
    return st.integers(max(1, longest - 1), 3 * longest)


@st.composite
def _limits(draw: st.DrawFn, longest: int, tight_mode: PreemptionMode | None) -> Limits:
    is_tight = tight_mode is not None
    most_swapped = st.integers(longest if is_tight else 0, 2 * longest)
    return Limits(
        max_num_batched_tokens=draw(st.integers(min_value=16 if is_tight else 1, max_value=96)),
        max_num_seqs=draw(st.integers(min_value=2 if is_tight else 1, max_value=8)),
        max_num_swapped_blocks=draw(st.none() | most_swapped),
        preemption_mode=tight_mode or draw(st.sampled_from(PreemptionMode)),
        deadline_rule=draw(st.sampled_from(DeadlineRule)),
    )


def prefix_hosts(num_blocks: int, prefix_cache: PrefixCaching) -> st.SearchStrategy[PrefixHost]:
    """Return a strategy for the prefix cache's host memory: often none, or a small one."""
    if prefix_cache is PrefixCaching.OFF:
        return st.just(NO_PREFIX_HOST)
    sizes = st.sampled_from((0, 1, num_blocks, 8 * num_blocks))
    return st.builds(PrefixHost, sizes, st.sampled_from(HostWrites))
