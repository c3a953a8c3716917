"""Plans beside vLLM's decodes as a group are those that the policy makes when it sees each one."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from real_vllm import Loop, Workload, make_config, make_scheduler, random_workload

from slosched.core import Request, SchedulerOutput, SchedulerView
from slosched.integrations.vllm import SLOScheduler
from slosched.integrations.vllm.decodes import RunningDecodes
from slosched.integrations.vllm.grouped import GroupedPlans
from slosched.scheduler.declines import Declines
from slosched.scheduler.plan_check import PlanCheck

POLICIES = [
    "fcfs",
    "vllm_v1",
    "sjf:drop=infeasible",
    "slo_aware",
    "scorpio",
    "goodput",
    "goodput+door",
]
NUM_WORKLOADS = 12


@dataclass
class Twice:
    """Makes each grouped plan a second time, with a copy of the policy that sees every request."""

    grouped: GroupedPlans
    policy: Any
    seen: Counter[str]

    def plan(
        self, decodes: Sequence[Request], view: SchedulerView, check: PlanCheck
    ) -> SchedulerOutput | None:
        twin = deepcopy(self.policy)
        self.grouped._declines = Declines()  # ask although the policy has declined lately
        plan = self.grouped.plan(decodes, view, check)
        self.seen["declined"] += plan is None
        if plan is not None:
            # A tuple has no index of those that wait: the copy looks at each of them, too.
            expected = twin.schedule(replace(view, waiting=tuple(view.waiting)))
            assert plan.num_scheduled_tokens == expected.num_scheduled_tokens
            assert plan.rejected == expected.rejected
            assert plan.num_found_tokens == expected.num_found_tokens
            assert plan.shape in (None, expected.shape)
            assert plan.is_at_leisure == expected.is_at_leisure
            assert not expected.preempted
            self.seen["grouped"] += 1
            self.seen["with prompts"] += max(plan.num_scheduled_tokens.values()) > 1
            self.seen["rejected"] += len(plan.rejected)
            self.seen["seats full"] += len(view.running) == view.limits.max_num_seqs
            self.seen["found"] += len(plan.num_found_tokens)
        return plan


@pytest.mark.parametrize("caches_prefixes", [False, True], ids=["plain", "prefix_cache"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_beside_the_group_is_the_plan_for_all(
    policy: str,
    caches_prefixes: bool,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for shared in (Request, RunningDecodes):  # by a policy and its copy
        monkeypatch.setattr(shared, "__deepcopy__", lambda self, _: self, raising=False)
    seen: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        rng = random.Random(f"grouped {seed}")
        workload = random_workload(3000 + seed, shares_prefixes=caches_prefixes)
        if rng.random() < 0.6:  # then seats are scarce and blocks are not
            workload = replace(workload, max_num_seqs=rng.choice([2, 3, 5]), num_blocks=400)
        seen += run_twice(policy, workload, rng, caches_prefixes=caches_prefixes)
    record_property("seen", dict(seen))
    assert seen["grouped"] > 100, seen
    assert seen["with prompts"] > 10, seen
    assert seen["seats full"] > 20, seen


def run_twice(
    policy: str, workload: Workload, rng: random.Random, *, caches_prefixes: bool
) -> Counter[str]:
    """Run a workload to its end, and return how often a plan was compared, and of what kind."""
    is_async = rng.random() < 0.5
    settings = {
        "policy": policy,
        "profile": "rtx4090/llama-3.1-8b",
        "any_device": True,
        "slo_ttft_s": rng.choice([0.05, 1, 100]),
        "slo_tpot_s": rng.choice([0.02, 0.1, 1]),
    }
    config = partial(make_config, workload, is_async=is_async, caches_prefixes=caches_prefixes)
    scheduler = make_scheduler(SLOScheduler, config(settings=settings))
    link = scheduler._link
    seen: Counter[str] = Counter()
    link._grouped = Twice(link._grouped, link._policy, seen)
    Loop(scheduler, workload, is_async, arrival_s=time.time()).run()
    assert not scheduler.requests
    assert not link.truth.fallbacks, link.truth
    return seen
