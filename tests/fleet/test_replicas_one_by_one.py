"""Replicas that are simulated one by one fare as in the whole fleet, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from slosched.core import SLO, DeadlineRule, Limits
from slosched.evaluate.capacity.pool import local_pool
from slosched.evaluate.long_fleets import play_long
from slosched.fleet.apart import places_of
from slosched.fleet.simulate import simulate_fleet
from slosched.fleet.spec import make_router
from slosched.fleet.view import ReplicaKind
from slosched.metrics.rows import RequestRows
from slosched.perfmodel import load_model
from slosched.policy.spec import make_policy
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import synthesize
from slosched.workload.long_trace import LongTrace
from slosched.workload.synthetic import synthesize_long

SLO_OF_ALL = SLO(ttft_s=1.0, tpot_s=0.05)
NUM_REQUESTS, RATE = 1100, 60.0
KIND = ReplicaKind(
    load_model("h100/llama-3.1-8b"),
    SimulationConfig(num_blocks=4000, disturbances=Disturbances(noise=0.1), seed=3),
)


def rows_of_whole_fleet(policy: str, kind: ReplicaKind, num_replicas: int) -> RequestRows:
    trace = synthesize("azure_conv", num_requests=NUM_REQUESTS, rate=RATE, slo=SLO_OF_ALL)
    requests = simulate_fleet(
        trace, make_policy(policy), [kind] * num_replicas, make_router("round_robin"), seed=3
    )
    return RequestRows.of(requests, kind.config.limits.deadline_rule)


def rows_one_by_one(policy: str, kind: ReplicaKind, num_replicas: int, jobs: int) -> RequestRows:
    return play_long(
        synthesize_long("azure_conv", NUM_REQUESTS, RATE, slo=SLO_OF_ALL),
        make_policy(policy),
        (kind,) * num_replicas,
        make_router("round_robin"),
        seed=3,
        make_pool=local_pool(jobs),
    )


def check_equal(rows: RequestRows, others: RequestRows) -> None:
    for each in fields(rows):
        np.testing.assert_array_equal(getattr(rows, each.name), getattr(others, each.name))


@pytest.mark.parametrize(
    ("policy", "rule"), [("fcfs", DeadlineRule.MEAN_TPOT), ("sarathi", DeadlineRule.ENVELOPE)]
)
def test_replicas_fare_alike_alone_and_in_the_fleet(policy: str, rule: DeadlineRule) -> None:
    config = replace(KIND.config, limits=Limits(deadline_rule=rule))
    if policy == "fcfs":  # steps whose times are known beforehand
        config = replace(config, disturbances=Disturbances())
    kind = KIND._replace(config=config)
    whole = rows_of_whole_fleet(policy, kind, 2)
    assert 0 < whole.attainment < 1
    check_equal(rows_one_by_one(policy, kind, 2, jobs=1), whole)


def test_more_replicas_than_wait_at_once_each_end_once() -> None:
    trace = synthesize_long("azure_conv", 150, 30.0, slo=SLO_OF_ALL)
    ended: list[int] = []
    rows = play_long(
        trace,
        make_policy("fcfs"),
        (KIND,) * 75,
        make_router("round_robin"),
        on_replica=ended.append,
    )
    assert sorted(ended) == list(range(75))
    assert not np.isnan(rows.ttft_s).any()


class OneWorker(Executor):
    """A pool that has done its first task, and still has the others before it."""

    def __init__(self) -> None:
        self.left: list[Future[Any]] = []
        self.is_cancelled = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if not self.left:
            future.set_result(fn(*args, **kwargs))
        self.left.append(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.is_cancelled |= cancel_futures


def test_ctrl_c_waits_for_no_other_replica() -> None:
    pool = OneWorker()

    def make_pool(initialize: Callable[[], None]) -> Executor:
        initialize()
        return pool

    def press_ctrl_c(_index: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play_long(
            synthesize_long("azure_conv", 30, 30.0, slo=SLO_OF_ALL),
            make_policy("fcfs"),
            (KIND,) * 10,
            make_router("round_robin"),
            make_pool=make_pool,
            on_replica=press_ctrl_c,
        )
    assert pool.is_cancelled


@pytest.mark.parametrize("change", [{"priority": 1}, {"slo": SLO(2.0, 0.05)}])
def test_a_trace_whose_requests_differ_is_no_long_one(change: dict[str, Any]) -> None:
    trace = synthesize("azure_conv", num_requests=3, rate=1.0, slo=SLO_OF_ALL)
    requests = (*trace.requests[:2], replace(trace.requests[2], **change))
    assert len(LongTrace.of(trace)) == 3
    with pytest.raises(ValueError, match="request '2' of 'azure_conv' differs"):
        LongTrace.of(replace(trace, requests=requests))


@pytest.mark.slow
def test_two_processes_play_what_one_does() -> None:
    check_equal(rows_one_by_one("fcfs", KIND, 3, 2), rows_one_by_one("fcfs", KIND, 3, 1))


def test_a_router_that_looks_at_replicas_has_no_places_beforehand() -> None:
    with pytest.raises(ValueError, match=r"PowerOfTwo.* looks at replicas .*take round_robin"):
        places_of(make_router("power_of_two"), (KIND, KIND), 4)


def test_replicas_of_different_sizes_are_not_played_one_by_one() -> None:
    small = KIND._replace(config=replace(KIND.config, num_blocks=100))
    with pytest.raises(ValueError, match="KV caches of 1600 and 64000 tokens"):
        places_of(make_router("round_robin"), (KIND, small), 4)


def test_a_long_trace_is_the_trace_as_columns() -> None:
    trace = synthesize("azure_conv", num_requests=500, rate=7.0, seed=5)
    columns = synthesize_long("azure_conv", 500, 7.0, seed=5)
    np.testing.assert_array_equal(columns.arrival_s, trace.arrivals_s)
    np.testing.assert_array_equal(columns.num_prompt_tokens, trace.prompt_tokens)
    np.testing.assert_array_equal(columns.num_output_tokens, trace.output_tokens)
    assert [str(number) for number in columns.number] == [r.request_id for r in trace.requests]


@pytest.mark.parametrize("kind", ["agents", "unheard_of"])
def test_a_long_trace_has_no_sessions(kind: str) -> None:
    with pytest.raises(ValueError, match="cannot be made as a long trace; choose one of azure_"):
        synthesize_long(kind, 10, 1.0)


def test_a_long_trace_needs_a_rate() -> None:
    with pytest.raises(ValueError, match=r"at a positive, finite rate, not 10 at 0\.0/s"):
        synthesize_long("poisson", 10, 0.0)
