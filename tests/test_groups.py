"""Several requests that answer one prompt: what they share, and how they end together."""

from __future__ import annotations

import hypothesis
import pytest
from factories import make_model, make_request
from hypothesis import given

from slosched.core import (
    NO_SLO,
    DeviceCopy,
    EndReason,
    Limits,
    OnInfeasible,
    Request,
    RequestStatus,
    SamplingParams,
    StepResult,
    fan_out,
)
from slosched.engine.checked_memory import CheckedMemory
from slosched.engine.loop import Engine
from slosched.kv import KVCache, PrefixCaching
from slosched.metrics import RequestRecord, StepRow, records_of
from slosched.policy import EDF, FCFS, POLICIES
from slosched.policy.spec import make_policy
from slosched.scheduler import Scheduler
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.simulator.simulated import SimulatedExecutor, VirtualClock
from slosched.testing.laws import fate
from slosched.testing.play import play
from slosched.testing.random_scenarios import group_scenarios, search
from slosched.testing.scenario import Scenario
from slosched.workload import Trace, TraceRequest, read_trace, write_trace

SIZE = 4


class Replica:
    """A scheduler with a simulated device that checks what each block holds."""

    def __init__(self, policy=None, *, blocks=64, prefix_cache=PrefixCaching.OFF, **limits):
        self.kv = KVCache(blocks, SIZE, 64, prefix_index=prefix_cache.new_index())
        self.clock = VirtualClock()
        self.scheduler = Scheduler(policy or EDF(), self.kv, Limits(**limits), make_model())
        device = SimulatedExecutor(make_model(), self.clock, {})
        self.engine = Engine(self.scheduler, CheckedMemory(device, SIZE), self.clock)

    def add(self, request: Request, n: int) -> tuple[Request, ...]:
        members = fan_out(request, n)
        self.scheduler.add_request(request)
        return members

    def step(self):
        record = self.engine.step()
        self.kv.check()
        return record

    def run(self) -> None:
        while self.engine.has_work:
            self.step()


def chunks_of(record) -> dict[str, tuple[int, int]]:
    """Return new and prior tokens by request."""
    return {
        c.request.request_id: (c.num_new_tokens, c.num_prior_tokens) for c in record.batch.chunks
    }


def test_siblings_have_names_and_seeds_of_their_own():
    request = make_request("a")
    request.sampling = SamplingParams(temperature=1.0, seed=2**64 - 2)
    members = fan_out(request, 3)
    assert [m.request_id for m in members] == ["a", "a-1", "a-2"]
    assert [m.sampling.seed for m in members] == [2**64 - 2, 2**64 - 1, 0]
    assert fan_out(make_request("b"), 2)[1].sampling.seed is None
    assert all(m.group is members[0].group for m in members)
    assert fan_out(make_request("b"), 1)[0].group is None


@pytest.mark.parametrize("prefix_cache", PrefixCaching)
def test_the_prompt_is_computed_once(prefix_cache):
    """Ten tokens are two full blocks, which are shared, and half a block, which is copied."""
    replica = Replica(prefix_cache=prefix_cache)
    first, *others = replica.add(make_request("a", num_prompt_tokens=10, max_tokens=4), 3)
    assert chunks_of(replica.step()) == {"a": (10, 0)}
    tail = replica.kv.block_tables["a"][2]
    record = replica.step()
    assert chunks_of(record) == {"a": (1, 10), "a-1": (1, 9), "a-2": (1, 9)}
    tables = replica.kv.block_tables
    assert tables["a-1"][:2] == tables["a-2"][:2] == tables["a"][:2]
    copies = [DeviceCopy(tail, tables[name][2]) for name in ("a-1", "a-2")]
    assert list(record.batch.device_copies) == copies
    assert replica.kv.num_blocks - replica.kv.num_free_blocks == 2 + 3
    assert [m.num_cached_tokens for m in others] == [9, 9]
    replica.run()
    assert [m.num_output_tokens for m in (first, *others)] == [4, 4, 4]
    assert replica.kv.num_free_blocks == replica.kv.num_blocks


def test_a_prompt_of_full_blocks_needs_no_copy():
    replica = Replica()
    replica.add(make_request("a", num_prompt_tokens=9, max_tokens=4), 2)
    replica.step()
    record = replica.step()
    assert chunks_of(record)["a-1"] == (1, 8)
    assert not record.batch.device_copies


def test_siblings_find_the_prompt_after_the_first_has_ended():
    replica = Replica()
    members = replica.add(make_request("a", num_prompt_tokens=10, max_tokens=1), 3)
    replica.step()
    assert members[0].status is RequestStatus.FINISHED
    record = replica.step()  # the half block went with its only holder
    assert chunks_of(record) == {"a-1": (2, 8), "a-2": (2, 8)}
    assert not replica.engine.has_work


def test_other_requests_share_nothing_without_a_prefix_cache():
    replica = Replica()
    for name in ("a", "b"):
        request = make_request(name, num_prompt_tokens=12, max_tokens=4)
        request.prompt_token_ids = list(range(12))
        replica.add(request, 2)
    replica.step()
    replica.step()
    tables = replica.kv.block_tables
    assert set(tables["a"]).isdisjoint(tables["b"])
    assert tables["a"][:2] == tables["a-1"][:2] != tables["b"][:2]


def test_the_cache_is_as_before_once_all_groups_have_ended():
    replica = Replica()
    before = type(replica.kv.prefixes)
    replica.add(make_request("a", num_prompt_tokens=10, max_tokens=4), 3)
    replica.run()
    replica.scheduler.add_request(make_request("b"))
    replica.step()
    assert type(replica.kv.prefixes) is before
    assert len(set(replica.kv.block_tables["b"])) == 2


def test_a_step_without_groups_asks_nothing_of_them(monkeypatch):
    replica = Replica()
    monkeypatch.delattr(type(replica.scheduler._groups), "find_tails")
    replica.scheduler.add_request(make_request("a"))
    replica.run()


@pytest.mark.parametrize("reason", [EndReason.CLIENT, EndReason.FAULT, EndReason.SHUTDOWN])
@pytest.mark.parametrize("gone", [0, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_abort_of_one_ends_all(num_steps, gone, reason):
    replica = Replica(max_num_batched_tokens=8)
    members = replica.add(make_request("a", num_prompt_tokens=10, max_tokens=9), 3)
    for _ in range(num_steps):
        replica.step()
    replica.scheduler.end(members[gone].request_id, reason, replica.clock.now_s())
    replica.step()
    assert {m.end_reason for m in members} == {reason}
    assert not replica.engine.has_work
    assert replica.kv.num_free_blocks == replica.kv.num_blocks


def test_one_that_stops_leaves_the_others_alone():
    replica = Replica()
    members = replica.add(make_request("a", max_tokens=5), 3)
    replica.step()
    replica.step()
    replica.scheduler.end("a-1", EndReason.STOP, replica.clock.now_s())
    replica.run()
    assert [m.end_reason for m in members] == [EndReason.LENGTH, EndReason.STOP, EndReason.LENGTH]


def test_a_rejection_of_the_first_rejects_all():
    replica = Replica(make_policy("edf:drop=expired"))
    members = replica.add(make_request("a", ttft_s=0.1), 3)
    replica.clock.advance(1.0)
    replica.step()
    replica.step()
    assert {m.end_reason for m in members} == {EndReason.EXPIRED}


def test_a_rejection_of_a_sibling_aborts_who_has_emitted():
    replica = Replica(make_policy("edf:drop=expired"), max_num_seqs=1)
    members = replica.add(make_request("a", ttft_s=0.1), 2)
    replica.step()
    replica.clock.advance(1.0)
    while replica.engine.has_work:
        replica.step()
    assert [m.end_reason for m in members] == [EndReason.SIBLING, EndReason.EXPIRED]


@pytest.mark.parametrize("on_infeasible", [OnInfeasible.RELEGATE, OnInfeasible.SERVE])
def test_siblings_that_one_plan_rejects_are_eased_once_and_all_served(on_infeasible):
    replica = Replica(make_policy("edf:drop=expired"), max_num_seqs=1)
    request = make_request("a", ttft_s=0.1)
    request.on_infeasible = on_infeasible
    members = replica.add(request, 30)
    replica.step()
    replica.clock.advance(0.15)  # more than is asked for, less than twice as much
    while members[1].asked_slo is None:
        replica.step()
    eased_s = NO_SLO.ttft_s if on_infeasible is OnInfeasible.RELEGATE else 0.2
    assert {member.slo.ttft_s for member in members[1:]} == {eased_s}
    replica.run()
    assert {member.end_reason for member in members} == {EndReason.LENGTH}


def test_a_group_that_can_never_fit_is_rejected_whole():
    replica = Replica(blocks=4)
    members = replica.add(make_request("a", num_prompt_tokens=10, max_tokens=9), 2)
    assert {m.end_reason for m in members} == {EndReason.TOO_LONG}
    assert not replica.engine.has_work


def test_a_sibling_is_not_queued_by_itself():
    replica = Replica()
    _, sibling = fan_out(make_request("a"), 2)
    with pytest.raises(ValueError, match="first of its group, 'a'"):
        replica.scheduler.add_request(sibling)


def test_siblings_go_before_requests_that_were_not_admitted():
    replica = Replica(FCFS(), max_num_seqs=2)
    replica.add(make_request("a", max_tokens=9), 2)
    replica.scheduler.add_request(make_request("b"))
    replica.scheduler.add_request(make_request("c"))
    replica.step()  # "b" takes the second seat before the siblings are known
    assert [r.request_id for r in replica.scheduler.view(0.0).waiting] == ["a-1", "c"]


def test_a_group_counts_once_by_its_worst_answer():
    late, good = make_request("a", ttft_s=1.0), make_request("b", ttft_s=1.0)
    members, others = fan_out(late, 2), fan_out(good, 2)
    for i, member in enumerate((*members, *others)):
        member.status, member.end_reason = RequestStatus.FINISHED, EndReason.STOP
        member.num_output_tokens, member.token_times_s = 1, [2.0 if i == 0 else 0.5 + i / 100]
        member.end_s = member.token_times_s[-1]
    alone = make_request("c")
    rule = Limits().deadline_rule
    names = [r.request_id for r in records_of([*members, *others, alone], rule)]
    assert names == ["a", "b-1", "c"]
    assert records_of([alone], rule) == [RequestRecord.from_request(alone)]


def test_a_trace_says_how_often_a_prompt_is_answered(tmp_path):
    wanted = [
        TraceRequest("a", 0.0, 100, 20, n=3),
        TraceRequest("b", 0.001, 40, 10),
        TraceRequest("c", 0.5, 300, 5, n=2),
    ]
    for suffix in ("csv", "jsonl", "parquet"):
        path = tmp_path / f"trace.{suffix}"
        write_trace(Trace.of(wanted, "groups"), path)
        assert [r.n for r in read_trace(path).requests] == [3, 1, 2]
    (tmp_path / "plain.csv").write_text("arrival_s,input_tokens,output_tokens,n\n0,9,9,\n1,9,9,4\n")
    assert [r.n for r in read_trace(tmp_path / "plain.csv").requests] == [1, 4]
    requests = simulate(read_trace(path), EDF(), make_model(), SimulationConfig())
    names = ["a", "a-1", "a-2", "b", "c", "c-1"]
    assert [r.request_id for r in requests] == names
    assert [r.num_output_tokens for r in requests] == [20, 20, 20, 10, 5, 5]
    assert {r.status for r in requests} == {RequestStatus.FINISHED}


def test_siblings_cost_a_decode_not_a_prompt():
    """After the two chunks of the prompt, all three decode in the same steps."""
    trace = Trace.of([TraceRequest("a", 0.0, 1000, 3, n=3)], "one")
    rows: list[StepRow] = []
    first, *siblings = simulate(
        trace, EDF(), make_model(), SimulationConfig(), on_row=lambda row, _: rows.append(row)
    )
    work = [(row.num_prefill_tokens, row.num_decodes) for row in rows]
    assert work == [(512, 0), (488, 0), (0, 3), (0, 3), (0, 2)]
    assert {s.token_times_s[0] for s in siblings} == {first.token_times_s[1]}


def check_groups(name: str, max_examples: int) -> None:
    """Play random groups: blocks are checked after every step, and every end comes once."""

    @hypothesis.seed(0)
    @search(max_examples, shrink=True)
    @given(group_scenarios())
    def obeys(scenario: Scenario) -> None:
        play(make_policy(name), scenario)
        grouped = scenario.simulated(make_policy(name))
        one_by_one = scenario.simulated(make_policy(name), on_step=lambda _: None)
        assert [fate(r) for r in grouped] == [fate(r) for r in one_by_one]

    obeys()


@pytest.mark.parametrize("name", POLICIES)
def test_random_groups_leak_nothing_and_end_once(name):
    check_groups(name, max_examples=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_many_random_groups_leak_nothing_and_end_once(name):
    check_groups(name, max_examples=60)


def test_a_failed_member_ends_its_group():
    replica = Replica()
    members = replica.add(make_request("a", max_tokens=5), 3)
    replica.step()
    batch = replica.scheduler.schedule(replica.clock.now_s())
    result = StepResult({"a": 1, "a-1": 1}, failed={"a-2": "not a number"})
    replica.scheduler.update(batch, result, replica.clock.now_s())
    replica.step()
    assert {m.end_reason for m in members} == {EndReason.FAULT}
    replica.kv.check()


def test_vllm_v0_swaps_groups_and_recomputes_other_requests():
    """Three answers leave together when blocks run out beside an older request."""
    replica = Replica(make_policy("vllm_v0:watermark=0"), blocks=7)
    alone = make_request("a", num_prompt_tokens=7, max_tokens=12)
    replica.scheduler.add_request(alone)
    members = replica.add(make_request("b", num_prompt_tokens=5, max_tokens=9), 3)
    while not any(member.num_preemptions for member in members):
        replica.step()
    assert {m.status for m in members} == {RequestStatus.SWAPPED}
    assert alone.status is RequestStatus.RUNNING
    replica.run()
    assert [m.num_output_tokens for m in members] == [9, 9, 9]
    assert (alone.num_output_tokens, alone.num_preemptions) == (12, 0)

    replica = Replica(make_policy("vllm_v0:watermark=0"), blocks=7)
    several = [make_request(name, num_prompt_tokens=6, max_tokens=20) for name in "abc"]
    for request in several:
        replica.scheduler.add_request(request)
    replica.run()
    assert sum(r.num_preemptions for r in several) > 0 == sum(r.num_swaps for r in several)


def test_vllm_v0_serves_a_group_in_turns_that_is_larger_than_the_cache():
    replica = Replica(make_policy("vllm_v0:watermark=0"), blocks=7)
    members = replica.add(make_request("b", num_prompt_tokens=5, max_tokens=20), 5)
    replica.run()
    assert [m.num_output_tokens for m in members] == [20] * 5
    assert sum(m.num_swaps for m in members) > 0
