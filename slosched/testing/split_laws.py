"""The laws of prefill and decode pools, checked on random scenarios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from slosched.core import Policy, Request, RequestStatus
from slosched.fleet.routers.least_requests import LeastRequests
from slosched.fleet.split import SplitConfig, SplitFleet
from slosched.fleet.transfer import KVTransfer, Transfer
from slosched.fleet.view import ReplicaKind
from slosched.kv import NO_PREFIX_HOST, PrefixCaching
from slosched.simulator.disturbances import UNDISTURBED
from slosched.testing.laws import fate
from slosched.testing.plans import require
from slosched.testing.random_scenarios import scenarios, search
from slosched.testing.scenario import TICK_S, Scenario, device_model

_AT_ONCE = KVTransfer(bytes_per_token=1)
_LONG_S = 2.0**10
"""More than any request of a scenario takes, and a power of two, so that sums are exact."""


def check_split(
    make_policy: Callable[[], Policy],
    *,
    max_examples: int = 50,
    seed: int = 0,
    shrink: bool = True,
) -> None:
    """Raise if pools with `make_policy` in the engines break a law on a random scenario.

    The laws are: every request ends exactly once, and has all its tokens if it has finished; what
    was handed over is what got a second token, and its first token comes with the end of its
    transfer; at the end no KV block is held in either pool; two runs are equal to the bit; and if
    each request is alone and transfers take no time, the pools are equal to the bit to one replica.
    Without `shrink`, the error is that of the first scenario on which a law broke.
    """

    @search(max_examples, shrink=shrink)
    @given(scenarios(), _configs(), st.integers(1, 3))
    def laws_hold(scenario: Scenario, config: SplitConfig, num_decode: int) -> None:
        first = _played(scenario, make_policy(), config, num_decode)
        second = _played(scenario, make_policy(), config, num_decode)
        require(first == second, "the same pools served the same requests in two ways")
        apart = _apart(scenario)
        alone = [fate(request) for request in apart.simulated(make_policy())]
        pools = _played(apart, make_policy(), replace(config, transfer=_AT_ONCE), num_decode)
        require(pools == alone, "a request that is alone was served in another way in pools")

    hypothesis.seed(seed)(laws_hold)()


def _apart(scenario: Scenario) -> Scenario:
    """Return a scenario in which no request meets another, or what a cache keeps of one."""
    return replace(
        scenario,
        requests=tuple(replace(r, arrival_s=i * _LONG_S) for i, r in enumerate(scenario.requests)),
        disturbances=UNDISTURBED,
        prefix_cache=PrefixCaching.OFF,  # one replica's cache also evicts for outputs
        prefix_host=NO_PREFIX_HOST,
    )


def _played(
    scenario: Scenario, policy: Policy, config: SplitConfig, num_decode: int
) -> list[tuple[object, ...]]:
    """Play a scenario in pools, check all laws of a single run, and return the fates."""
    ended: Counter[str] = Counter()
    transfers: list[Transfer] = []

    def count(_row: object, requests: Sequence[Request]) -> None:
        ended.update(request.request_id for request in requests)

    fleet = SplitFleet(
        scenario.trace(),
        policy,
        [ReplicaKind(device_model(), scenario.config())] * (config.num_prefill + num_decode),
        (LeastRequests(), LeastRequests()),
        config,
        on_row=count,
        on_transfer=transfers.append,
    )
    requests = fleet.play()
    for request, asked in zip(requests, scenario.requests, strict=True):
        name, times_s = request.request_id, request.token_times_s
        require(request.status.is_ended, f"{name} has no end")
        require(ended[name] == 1, f"{name} ended {ended[name]} times")
        if request.status is RequestStatus.FINISHED:
            require(len(times_s) == asked.num_output_tokens, f"{name} lost or gained tokens")
        require(times_s == sorted(times_s), f"the tokens of {name} are not in order")
    handed_over = {t.request.request_id: t for t in transfers}
    require(len(handed_over) == len(transfers), "a request was handed over twice")
    decoded = {r.request_id for r in requests if r.num_output_tokens > 1}
    require(decoded == handed_over.keys(), "not all that decoded, or more, was handed over")
    for transfer in transfers:
        name, times_s = transfer.request.request_id, transfer.request.token_times_s
        require(transfer.prefill_end_s <= transfer.end_s == times_s[0], f"{name} came too early")
    for replica in (*fleet.prefill, *fleet.decode):
        kv = replica.simulated.scheduler.kv
        kv.check()
        require(kv.num_free_blocks == kv.num_blocks, f"{replica} holds KV blocks at the end")
        require(not replica.num_in_transfer, f"{replica} counts transfers at the end")
        require(replica.num_requests == 0, f"{replica} seems to have requests at the end")
    return [fate(request) for request in requests]


@st.composite
def _configs(draw: st.DrawFn) -> SplitConfig:
    """Draw the prefill pool's size and how fast KV blocks are copied."""
    transfer = KVTransfer(
        bytes_per_token=1,
        bytes_per_s=draw(st.sampled_from((0.25, 4.0, 64.0))) / TICK_S,
        latency_s=draw(st.sampled_from((0, 1, 50))) * TICK_S,
        num_parts=draw(st.sampled_from((1, 4))),
    )
    return SplitConfig(
        draw(st.integers(1, 3)), transfer, reserved_tokens=draw(st.sampled_from((0, 4, 64)))
    )
