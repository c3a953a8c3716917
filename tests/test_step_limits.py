"""Two limits on a step: the tokens of one request, and the KV blocks that a start leaves free."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import make_model, make_request, make_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from law_variants import VARIANTS
from views import R, view_of

from slosched.batch import BatchBuilder
from slosched.core import IllegalPlanError, Limits, SchedulerOutput, SchedulerView
from slosched.policy import FCFS, Goodput
from slosched.policy.engines.vllm_v1.policy import VLLMV1
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.testing import Scenario, check_laws, scenarios
from slosched.workload import Trace, TraceRequest

CHUNKS = Limits(max_num_batched_tokens=100, max_num_seqs=8, max_chunk_tokens=30)
MARKED = Limits(max_num_batched_tokens=100, max_num_seqs=8, num_watermark_blocks=20)
LAWFUL = [name for name in VARIANTS if "vllm_v0" not in name and name != "portfolio, changes over"]
"""All variants but those that run `vllm_v0`, which refuses both limits."""


def test_no_request_gets_more_than_its_share_of_a_step() -> None:
    prompts = [R("a", 80, 1.0), R("b", 50, 1.0), R("c", 20, 1.0), R("d", 90, 1.0)]
    for policy in (FCFS(), Goodput(), VLLMV1()):
        plan = policy.schedule(view_of(prompts, limits=CHUNKS))
        assert sorted(plan.num_scheduled_tokens.values()) == [20, 20, 30, 30], policy


def test_a_request_that_is_alone_has_the_whole_step() -> None:
    scheduler = make_scheduler(limits=CHUNKS)
    scheduler.add_request(make_request("a", 80))
    assert [chunk.num_new_tokens for chunk in scheduler.schedule(0.0).chunks] == [80]
    scheduler.add_request(make_request("b", 80))
    assert [chunk.num_new_tokens for chunk in scheduler.schedule(1.0).chunks] == [30]


def test_a_start_leaves_the_watermark_free_unless_nobody_runs() -> None:
    """A block holds one token here."""
    first, second, running = R("a", 40, 1.0), R("b", 40, 1.0), R("c", 60, 1.0, done=30)
    free = view_of([first, second], limits=MARKED, num_blocks=90)
    assert FCFS().schedule(free).num_scheduled_tokens == {"a": 40}
    assert FCFS().schedule(replace(free, num_finishing=1)).num_scheduled_tokens == {"a": 40}
    tight = view_of([first], limits=MARKED, num_blocks=50)
    assert FCFS().schedule(tight).num_scheduled_tokens == {"a": 40}
    assert FCFS().schedule(replace(tight, num_finishing=1)).num_scheduled_tokens == {}
    busy = view_of([running], limits=MARKED, num_blocks=60)
    assert FCFS().schedule(busy).num_scheduled_tokens == {"c": 30}


def test_a_start_that_may_be_cut_is_cut_above_the_watermark() -> None:
    view = view_of([R("a", 40, 1.0), R("c", 60, 1.0, done=59)], limits=MARKED, num_blocks=100)
    batch = BatchBuilder(view)
    assert batch.add(view.waiting[0]) == 41 - 20
    assert batch.add(view.running[0]) == 1, "who runs may use what is left free"


class Careless(FCFS):
    """FCFS that does not know the two limits."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        limits = replace(view.limits, max_chunk_tokens=None, num_watermark_blocks=0)
        return super().schedule(replace(view, limits=limits))


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [(CHUNKS, "the limit of one request is 30"), (MARKED, "the watermark is 20")],
)
def test_a_plan_beyond_the_limits_is_refused(limits: Limits, complaint: str) -> None:
    scheduler = make_scheduler(Careless(), limits=limits, num_blocks=110, block_size=1)
    for name in "ab":
        scheduler.add_request(make_request(name, 48))
    with pytest.raises(IllegalPlanError, match=complaint):
        scheduler.schedule(0.0)


def test_vllm_v0_refuses_limits_that_it_does_not_know() -> None:
    for limits in (CHUNKS, MARKED):
        with pytest.raises(ValueError, match="leave out --watermark"):
            VARIANTS["vllm_v0"]().schedule(view_of([R("a", 8, 1.0)], limits=limits))


def test_the_limits_are_vllm_v1s_options_of_these_names() -> None:
    requests = [TraceRequest(f"r{i}", 0.03 * i, 90 + 37 * i % 200, 40) for i in range(40)]
    trace = Trace(tuple(requests), "even")
    config = SimulationConfig(limits=replace(CHUNKS, max_chunk_tokens=None), num_blocks=60)

    def played(policy: VLLMV1, limits: Limits) -> list[object]:
        model = make_model()
        done = simulate(trace, policy, model, replace(config, limits=limits))
        return [(r.started_s, r.num_preemptions, tuple(r.token_times_s)) for r in done]

    plain = played(VLLMV1(), config.limits)
    options = VLLMV1(long_prefill_token_threshold=30, watermark=0.1)
    limits = replace(config.limits, max_chunk_tokens=30, num_watermark_blocks=6)
    assert played(options, config.limits) == played(VLLMV1(), limits) != plain


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("fcfs", "goodput") else pytest.mark.slow)
        for name in LAWFUL
    ],
)
@settings(max_examples=6)
@given(scenarios(), st.sampled_from([None, 1, 2, 5, 9]), st.sampled_from([0, 1, 3]))
def test_every_policy_obeys_the_laws(
    name: str, scenario: Scenario, most: int | None, watermark: int
) -> None:
    limits = replace(scenario.limits, max_chunk_tokens=most, num_watermark_blocks=watermark)
    check_laws(VARIANTS[name], replace(scenario, limits=limits), conserves_work=False)
