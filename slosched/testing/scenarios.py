"""Random scenarios, as hypothesis draws them."""

from __future__ import annotations

from hypothesis import strategies as st

from slosched.core import SLO, DeadlineRule, Limits, PreemptionMode
from slosched.kv import NO_PREFIX_HOST, HostWrites, PrefixCaching, PrefixHost
from slosched.simulator.disturbances import UNDISTURBED, Disturbances
from slosched.testing.scenario import TICK_S, Scenario, ScenarioRequest

_ALL_DISTURBANCES = Disturbances(0.1, 0.2, tail=0.1, stall_s=64 * TICK_S, stall_every_s=0.25)


@st.composite
def scenarios(draw: st.DrawFn, max_requests: int = 12) -> Scenario:
    """Random scenarios, many of them short of KV blocks, seats, tokens or time."""
    ttft_s = st.integers(min_value=8, max_value=1024).map(lambda n: n * TICK_S)
    tpot_s = st.integers(min_value=4, max_value=128).map(lambda n: n * TICK_S)
    gap_s = st.just(0.0) | st.integers(min_value=1, max_value=64).map(lambda n: n * TICK_S)
    max_tokens = draw(st.integers(min_value=1, max_value=24))
    prefix_cache = draw(st.sampled_from(PrefixCaching))
    # Few different ones: most requests begin like another.
    hashes = st.lists(st.integers(0, 1), max_size=0 if prefix_cache is PrefixCaching.OFF else 6)
    arrival_s = 0.0
    requests = []
    for _ in range(draw(st.integers(min_value=1, max_value=max_requests))):
        arrival_s += draw(gap_s)
        requests.append(
            ScenarioRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=draw(st.integers(min_value=1, max_value=48)),
                num_output_tokens=draw(st.integers(min_value=1, max_value=max_tokens)),
                slo=SLO(draw(ttft_s), draw(tpot_s)),
                abort_at_step=draw(st.none() | st.integers(min_value=0, max_value=30)),
                prefix_hashes=tuple(draw(hashes)),
            )
        )
    block_size = draw(st.sampled_from((1, 4, 16)))
    longest = -(-(max(r.num_prompt_tokens for r in requests) + max_tokens) // block_size)
    limits = Limits(
        max_num_batched_tokens=draw(st.integers(min_value=1, max_value=96)),
        max_num_seqs=draw(st.integers(min_value=1, max_value=8)),
        max_num_swapped_blocks=draw(st.none() | st.integers(min_value=0, max_value=2 * longest)),
        preemption_mode=draw(st.sampled_from(PreemptionMode)),
        deadline_rule=draw(st.sampled_from(DeadlineRule)),
    )
    return Scenario(
        requests=tuple(requests),
        num_blocks=draw(st.integers(min_value=max(1, longest - 1), max_value=3 * longest)),
        block_size=block_size,
        num_host_blocks=draw(st.sampled_from((0, longest, 8 * longest))),
        limits=limits,
        max_tokens=max_tokens,
        prefix_cache=prefix_cache,
        prefix_host=draw(prefix_hosts(longest, prefix_cache)),
        prefix_block_tokens=draw(st.sampled_from((8, 10, 16))),
        disturbances=draw(st.sampled_from((UNDISTURBED, _ALL_DISTURBANCES))),
        overlap=draw(st.booleans()),
    )


def prefix_hosts(num_blocks: int, prefix_cache: PrefixCaching) -> st.SearchStrategy[PrefixHost]:
    """Hosts for what the prefix cache evicts, if there is one: often none, or rather small."""
    if prefix_cache is PrefixCaching.OFF:
        return st.just(NO_PREFIX_HOST)
    sizes = st.sampled_from((0, 1, num_blocks, 8 * num_blocks))
    return st.builds(PrefixHost, sizes, st.sampled_from(HostWrites))
