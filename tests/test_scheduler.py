"""The Scheduler: it carries out a plan exactly as it is written, or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from factories import make_model, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slosched.core import (
    SLO,
    BatchShape,
    DeadlineRule,
    EndReason,
    IllegalPlanError,
    Limits,
    Policy,
    PreemptionMode,
    Request,
    RequestStatus,
    ScheduledBatch,
    SchedulerOutput,
    SchedulerView,
    StepResult,
)
from slosched.core.merged_blocks import RepeatingOutput
from slosched.kv import KVCache
from slosched.policy import POLICIES
from slosched.scheduler import Scheduler

BLOCK_SIZE = 4


@dataclass
class Told(Policy):
    """A policy that returns the plan that the test has set."""

    plan: SchedulerOutput = field(default_factory=SchedulerOutput)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        return self.plan


class Bench:
    """A scheduler whose plans the test writes by hand."""

    def __init__(
        self, num_blocks: int = 8, num_host_blocks: int = 8, limits: Limits | None = None
    ) -> None:
        self.policy = Told()
        self.kv = KVCache(num_blocks, BLOCK_SIZE, num_host_blocks)
        self.scheduler = Scheduler(self.policy, self.kv, limits)
        self.now_s = 0.0

    def add(self, name: str, num_prompt_tokens: int = 8, **fields: object) -> Request:
        request = make_request(name, num_prompt_tokens, **fields)
        self.scheduler.add_request(request)
        return request

    def plan(self, tokens: dict[str, int] | None = None, **fates: object) -> ScheduledBatch:
        plan_class = RepeatingOutput if "repeated" in fates else SchedulerOutput
        self.policy.plan = plan_class(tokens or {}, **fates)
        return self.scheduler.schedule(self.now_s)

    def step(self, tokens: dict[str, int], *, stopped: str = "", **fates: object) -> ScheduledBatch:
        """Run a plan as a step of one second, with a token for each chunk that emits one."""
        batch = self.plan(tokens, **fates)
        self.now_s += 1.0
        emitted = {c.request.request_id: 7 for c in batch.chunks if c.emits_token}
        self.scheduler.update(batch, StepResult(emitted, frozenset(stopped)), self.now_s)
        return batch

    def queues(self) -> tuple[list[str], list[str], list[str]]:
        view = self.scheduler.view(self.now_s)
        waiting, running, swapped = (
            [r.request_id for r in queue] for queue in (view.waiting, view.running, view.swapped)
        )
        return waiting, running, swapped


def test_a_request_lives_from_queue_to_last_token() -> None:
    bench = Bench()
    request = bench.add("a", 8, max_tokens=2, arrival_s=0.0)
    assert bench.queues() == (["a"], [], [])

    first = bench.step({"a": 5})
    assert bench.queues() == ([], ["a"], [])
    assert request.status is RequestStatus.RUNNING
    assert (first.chunks[0].num_prior_tokens, first.chunks[0].emits_token) == (0, False)
    assert (request.num_computed_tokens, request.num_output_tokens) == (5, 0)

    second = bench.step({"a": 3})
    assert (second.chunks[0].num_prior_tokens, second.chunks[0].emits_token) == (5, True)
    assert (request.num_output_tokens, request.token_times_s) == (1, [2.0])
    assert request.is_decode

    bench.step({"a": 1})
    assert (request.status, request.end_reason) == (RequestStatus.FINISHED, EndReason.LENGTH)
    assert (request.end_s, request.output_token_ids) == (3.0, [7, 7])
    assert bench.scheduler.take_ended() == [request]
    assert bench.scheduler.take_ended() == []
    assert bench.kv.num_free_blocks == 8


def test_the_model_may_end_a_request_before_its_limit() -> None:
    bench = Bench()
    request = bench.add("a", 8, max_tokens=16)
    bench.step({"a": 8}, stopped="a")
    assert (request.status, request.end_reason) == (RequestStatus.FINISHED, EndReason.STOP)


def test_stopping_at_the_limit_counts_as_the_models_decision() -> None:
    bench = Bench()
    request = bench.add("a", 8, max_tokens=1)
    bench.step({"a": 8}, stopped="a")
    assert request.end_reason is EndReason.STOP


@pytest.mark.parametrize(("max_tokens", "fits"), [(24, True), (25, False)])
def test_what_can_never_fit_is_rejected_on_arrival(max_tokens: int, fits: bool) -> None:
    """8 prompt tokens and 24 output tokens fill the 8 blocks of 4 tokens."""
    bench = Bench()
    request = bench.add("a", 8, max_tokens=max_tokens, arrival_s=3.0)
    if fits:
        assert bench.queues() == (["a"], [], [])
        return
    assert (request.status, request.end_reason) == (RequestStatus.REJECTED, EndReason.TOO_LONG)
    assert request.end_s == 3.0
    assert bench.scheduler.take_ended() == [request]
    assert bench.scheduler.num_unfinished == 0


def test_an_id_can_be_used_again_only_after_its_end() -> None:
    bench = Bench()
    bench.add("a")
    with pytest.raises(ValueError, match="'a' is already queued"):
        bench.add("a")
    bench.scheduler.end("a", EndReason.CLIENT, 0.0)
    bench.add("a")
    assert bench.scheduler.num_waiting == 1


def test_a_request_that_has_begun_elsewhere_is_refused() -> None:
    bench = Bench()
    request = make_request()
    request.status = RequestStatus.RUNNING
    with pytest.raises(ValueError, match="'r0' is not new: it is running"):
        bench.scheduler.add_request(request)


@pytest.mark.parametrize("status", ["waiting", "running", "swapped", "preempted"])
def test_a_request_can_be_aborted_wherever_it_is(status: str) -> None:
    bench = Bench()
    request = bench.add("a")
    if status != "waiting":
        bench.step({"a": 8})
    if status == "swapped":
        bench.step({}, swapped_out=("a",))
    if status == "preempted":
        bench.step({}, preempted=("a",))
    assert bench.scheduler.end("a", EndReason.CLIENT, 9.0)
    assert (request.status, request.end_reason) == (RequestStatus.ABORTED, EndReason.CLIENT)
    assert request.end_s == 9.0
    assert bench.queues() == ([], [], [])
    assert (bench.kv.num_free_blocks, bench.kv.num_free_host_blocks) == (8, 8)
    assert bench.scheduler.take_ended() == [request]
    assert not bench.scheduler.end("a", EndReason.CLIENT, 10.0)
    assert not bench.scheduler.end("never seen", EndReason.CLIENT, 10.0)


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (EndReason.CLIENT, RequestStatus.ABORTED),
        (EndReason.FAULT, RequestStatus.ABORTED),
        (EndReason.SHUTDOWN, RequestStatus.ABORTED),
        (EndReason.STOP, RequestStatus.FINISHED),
        (EndReason.LENGTH, RequestStatus.FINISHED),
    ],
)
def test_the_reason_says_which_end_it_is(reason: EndReason, status: RequestStatus) -> None:
    bench = Bench()
    request = bench.add("a")
    assert bench.scheduler.end("a", reason, 1.0)
    assert (request.status, request.end_reason) == (status, reason)


@pytest.mark.parametrize(
    "reason", [EndReason.TOO_LONG, EndReason.EXPIRED, EndReason.INFEASIBLE, EndReason.CASCADE]
)
def test_only_a_plan_rejects(reason: EndReason) -> None:
    bench = Bench()
    request = bench.add("a")
    with pytest.raises(ValueError, match=f"'a' cannot end as {reason}"):
        bench.scheduler.end("a", reason, 1.0)
    assert request.status is RequestStatus.WAITING


def test_a_request_aborted_while_its_step_runs_gets_no_token() -> None:
    bench = Bench()
    gone, other = bench.add("a"), bench.add("b")
    batch = bench.plan({"a": 8, "b": 8})
    bench.scheduler.end("a", EndReason.CLIENT, 0.5)
    bench.scheduler.update(batch, StepResult({"a": 7, "b": 7}), 1.0)
    assert (gone.num_output_tokens, gone.token_times_s) == (0, [])
    assert other.num_output_tokens == 1
    assert bench.scheduler.take_ended() == [gone]


def test_preempted_by_recompute_goes_to_the_front_and_keeps_its_tokens() -> None:
    bench = Bench()
    victim = bench.add("a")
    bench.step({"a": 8})
    bench.add("b")
    bench.step({}, preempted=("a",))
    assert bench.queues() == (["a", "b"], [], [])
    assert (victim.num_computed_tokens, victim.num_preemptions) == (0, 1)
    assert (victim.num_output_tokens, victim.num_uncomputed_tokens) == (1, 9)
    assert bench.kv.num_free_blocks == 8
    batch = bench.step({"a": 9})
    assert batch.chunks[0].emits_token
    assert victim.num_output_tokens == 2, "the token it had is computed anew, not emitted anew"


def test_of_several_victims_the_last_named_is_first_in_line() -> None:
    bench = Bench()
    for name in "abc":
        bench.add(name)
    bench.step({"a": 8, "b": 8, "c": 8})
    bench.add("d", 4)
    bench.step({"a": 1}, preempted=("c", "b"))
    assert bench.queues() == (["b", "c", "d"], ["a"], [])


def test_swapping_out_and_in_keeps_progress_and_names_the_copies() -> None:
    bench = Bench()
    request = bench.add("a")
    bench.step({"a": 8})
    table = list(bench.kv.block_tables["a"])
    out = bench.step({}, swapped_out=("a",))
    assert bench.queues() == ([], [], ["a"])
    assert request.status is RequestStatus.SWAPPED
    assert [copy.device_block for copy in out.swap_out] == table
    assert (request.num_computed_tokens, request.num_swaps, request.num_preemptions) == (8, 1, 1)

    back = bench.step({"a": 1}, swapped_in=("a",))
    assert bench.queues() == ([], ["a"], [])
    assert [c.host_block for c in back.swap_in] == [c.host_block for c in out.swap_out]
    assert [c.device_block for c in back.swap_in] == list(back.chunks[0].block_table)[:2]
    assert (out.shape.num_swapped_blocks, back.shape.num_swapped_blocks) == (2, 2)
    assert request.num_output_tokens == 2


def test_a_rejected_request_leaves_with_its_reason() -> None:
    bench = Bench()
    waiting, running = bench.add("a"), bench.add("b")
    bench.step({"b": 4})
    bench.plan({}, rejected={"a": EndReason.EXPIRED, "b": EndReason.INFEASIBLE})
    assert (waiting.status, waiting.end_reason) == (RequestStatus.REJECTED, EndReason.EXPIRED)
    assert (running.status, running.end_reason) == (RequestStatus.REJECTED, EndReason.INFEASIBLE)
    assert waiting.end_s == 1.0
    assert bench.kv.num_free_blocks == 8


def test_blocks_and_seats_of_those_who_leave_serve_others_in_the_same_step() -> None:
    bench = Bench(num_blocks=5, limits=Limits(max_num_seqs=1))
    bench.add("a", 8, max_tokens=8)
    bench.add("b", 16, max_tokens=1)
    bench.step({"a": 8})
    bench.step({"b": 16}, preempted=("a",))
    assert bench.queues() == (["a"], [], [])


@pytest.mark.parametrize(
    ("rule", "expected_s"),
    [
        (DeadlineRule.ENVELOPE, [10.0, 10.5, 11.0]),
        (DeadlineRule.MEAN_TPOT, [10.0, 1.5, 2.0]),
        (DeadlineRule.TBT, [10.0, 1.5, 2.5]),
    ],
)
def test_deadlines_follow_the_rule_of_the_run(rule: DeadlineRule, expected_s: list[float]) -> None:
    bench = Bench(limits=Limits(deadline_rule=rule))
    request = bench.add("a", 8, ttft_s=10.0, tpot_s=0.5)
    deadlines = [request.deadline_s]
    for tokens in (8, 1):
        bench.step({"a": tokens})
        deadlines.append(request.deadline_s)
    assert deadlines == expected_s


def test_a_batch_says_its_shape_and_predicted_time() -> None:
    model = make_model()
    scheduler = Scheduler(Told(SchedulerOutput({"a": 6})), KVCache(8, BLOCK_SIZE), None, model)
    scheduler.add_request(make_request("a", 8))
    batch = scheduler.schedule(0.0)
    expected = BatchShape()
    expected.add(6, 0)
    assert batch.shape == expected
    assert batch.predicted_s == model.predict(expected)


def test_a_repeated_token_is_computed_in_its_place_and_emits_nothing() -> None:
    bench = Bench()
    bench.add("a", 8)
    bench.step({"a": 5})
    free = bench.kv.num_free_blocks
    chunk = bench.plan({"a": 1}, repeated=frozenset("a")).chunks[0]
    assert (chunk.num_prior_tokens, chunk.num_new_tokens, chunk.emits_token) == (4, 1, False)
    assert chunk.request.num_computed_tokens == 5
    assert bench.kv.num_free_blocks == free


TIGHT = Limits(max_num_batched_tokens=9, max_num_seqs=2, max_num_swapped_blocks=2)


@pytest.mark.parametrize(
    ("tokens", "fates", "message"),
    [
        pytest.param({"w": 0}, {}, "'w' is scheduled for 0 tokens", id="no token"),
        pytest.param({"w": -1}, {}, "'w' is scheduled for -1 tokens", id="negative"),
        pytest.param({"w": 9}, {}, "scheduled for 9 tokens, but has 8", id="too many of one"),
        pytest.param({"r": 2}, {}, "scheduled for 2 tokens, but has 1", id="beyond a decode"),
        pytest.param(
            {"r": 1, "w": 8, "s": 1},
            {"swapped_in": ("s",), "preempted": ("q",)},
            "10 tokens are scheduled, the limit is 9",
            id="tokens",
        ),
        pytest.param({"w": 8}, {}, "3 requests would run, the limit is 2", id="seats"),
        pytest.param({"nobody": 1}, {}, "'nobody' is scheduled but in no queue", id="unknown"),
        pytest.param({"s": 1}, {}, "'s' is scheduled but in no queue", id="runs from the host"),
        pytest.param(
            {"q": 2}, {"repeated": frozenset("q")}, "repeats 2 of 5 computed", id="repeats two"
        ),
        pytest.param(
            {"w": 1}, {"repeated": frozenset("w")}, "repeats 1 of 0 computed", id="repeats nothing"
        ),
        pytest.param(
            {"r": 1}, {"repeated": frozenset("q")}, "but is not scheduled", id="repeats unplanned"
        ),
        pytest.param(
            {"r": 1}, {"preempted": ("r",)}, "appears twice", id="scheduled and preempted"
        ),
        pytest.param({}, {"preempted": ("r", "r")}, "appears twice", id="preempted twice"),
        pytest.param(
            {}, {"preempted": ("r",), "swapped_out": ("r",)}, "appears twice", id="two fates"
        ),
        pytest.param(
            {"w": 8}, {"rejected": {"w": EndReason.EXPIRED}}, "appears twice", id="and rejected"
        ),
        pytest.param({}, {"preempted": ("w",)}, "'w' is preempted but not running", id="waits"),
        pytest.param({}, {"swapped_out": ("s",)}, "'s' is preempted but not running", id="is out"),
        pytest.param({}, {"swapped_in": ("s",)}, "swapped in but not scheduled", id="idle in"),
        pytest.param(
            {"r": 1}, {"swapped_in": ("r",)}, "swapped in twice, or was not", id="in but runs"
        ),
        pytest.param(
            {"s": 1},
            {"swapped_in": ("s", "s"), "preempted": ("r",)},
            "swapped in twice",
            id="in twice",
        ),
        pytest.param(
            {}, {"rejected": {"r": EndReason.EXPIRED}}, "'r' cannot be rejected", id="has emitted"
        ),
        pytest.param(
            {}, {"rejected": {"x": EndReason.EXPIRED}}, "'x' cannot be rejected", id="not known"
        ),
        pytest.param(
            {}, {"rejected": {"w": EndReason.STOP}}, "'w' cannot be rejected for", id="as stopped"
        ),
        pytest.param(
            {"w": 8},
            {"swapped_out": ("q",)},
            "2 KV blocks are swapped out, the host has 1 free",
            id="host is full",
        ),
        pytest.param(
            {"s": 1},
            {"swapped_in": ("s",), "swapped_out": ("r",)},
            "4 KV blocks are swapped, the limit is 2",
            id="swap traffic",
        ),
        pytest.param(
            {"w": 8, "r": 1},
            {"rejected": {"q": EndReason.EXPIRED}},
            "needs 1 KV blocks more",
            id="blocks",
        ),
    ],
)
def test_an_illegal_plan_changes_nothing(
    tokens: dict[str, int], fates: dict[str, object], message: str
) -> None:
    """w waits, r decodes, q has computed half of its prompt, and s is swapped out."""
    num_host_blocks = 3 if "host" in message else 5
    bench = Bench(num_blocks=6, num_host_blocks=num_host_blocks, limits=TIGHT)
    for name in "srqw":
        bench.add(name, 8, max_tokens=8)
    bench.step({"s": 8})
    bench.step({"r": 7}, swapped_out=("s",))
    bench.step({"r": 1, "q": 5})
    if "needs" in message:
        bench.kv.grow("somebody else", 2 * BLOCK_SIZE)
    before = state_of(bench)
    with pytest.raises(IllegalPlanError, match=message):
        bench.plan(tokens, **fates)
    assert state_of(bench) == before
    bench.kv.check()


@pytest.mark.parametrize(("plan", "what"), [(5, "the int 5"), (None, "None")])
def test_what_is_no_plan_is_called_so(plan: object, what: str) -> None:
    bench = Bench()
    bench.add("r")
    bench.policy.plan = plan
    with pytest.raises(IllegalPlanError, match=f"^Told.schedule returned {what}, not a Scheduler"):
        bench.scheduler.schedule(0.0)


def state_of(bench: Bench) -> list[object]:
    view = bench.scheduler.view(bench.now_s)
    requests = (*view.waiting, *view.running, *view.swapped)
    return [
        bench.queues(),
        (bench.kv.num_free_blocks, bench.kv.num_free_host_blocks),
        *((r.request_id, r.status, r.num_computed_tokens, r.num_preemptions) for r in requests),
        *((bench.kv.num_held_blocks(r.request_id), r.end_reason) for r in requests),
    ]


@pytest.mark.parametrize(("max_loras", "is_legal"), [(None, True), (2, True), (1, False)])
def test_a_plan_uses_no_more_adapters_than_allowed(max_loras: int | None, is_legal: bool) -> None:
    bench = Bench(limits=Limits(max_loras=max_loras))
    for name, lora_id in {"a": "l1", "b": "l1", "c": "l2", "d": None}.items():
        request = make_request(name, 4)
        request.lora_id = lora_id
        bench.scheduler.add_request(request)
    plan = dict.fromkeys("abcd", 4)
    if is_legal:
        assert len(bench.plan(plan).chunks) == 4
        return
    with pytest.raises(IllegalPlanError, match="2 LoRA adapters are used, the limit is 1"):
        bench.plan(plan)
    assert bench.scheduler.num_waiting == 4


class SchedulerMachine(RuleBasedStateMachine):
    """Clients come and go in any order, and the policy changes at any time."""

    @initialize(
        num_blocks=st.integers(4, 24),
        num_host_blocks=st.sampled_from((0, 3, 50)),
        mode=st.sampled_from(PreemptionMode),
        rule=st.sampled_from(DeadlineRule),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 40),
    )
    def start(
        self,
        num_blocks: int,
        num_host_blocks: int,
        mode: PreemptionMode,
        rule: DeadlineRule,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.kv = KVCache(num_blocks, BLOCK_SIZE, num_host_blocks)
        limits = Limits(
            max_num_batched_tokens,
            max_num_seqs,
            preemption_mode=mode,
            deadline_rule=rule,
        )
        self.scheduler = Scheduler(POLICIES["fcfs"](), self.kv, limits, make_model())
        self.now_s = 0.0
        self.requests: list[Request] = []
        self.ended: list[Request] = []

    @rule(
        num_prompt_tokens=st.integers(1, 60),
        max_tokens=st.integers(1, 12),
        ttft_s=st.sampled_from((0.01, 0.1, 10.0)),
    )
    def add(self, num_prompt_tokens: int, max_tokens: int, ttft_s: float) -> None:
        name = f"r{len(self.requests)}"
        slo = SLO(ttft_s, 0.02)
        request = Request(name, self.now_s, num_prompt_tokens, max_tokens, slo)
        self.requests.append(request)
        self.scheduler.add_request(request)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if not self.requests:
            return
        request = data.draw(st.sampled_from(self.requests))
        had_ended = request.status.is_ended
        assert self.scheduler.end(request.request_id, EndReason.CLIENT, self.now_s) != had_ended

    @rule(name=st.sampled_from(sorted(POLICIES)))
    def change_policy(self, name: str) -> None:
        self.scheduler.policy = POLICIES[name]()

    @rule(is_last=st.booleans())
    def step(self, is_last: bool) -> None:
        """Run a step; with `is_last` the model ends the first request that emits a token."""
        batch = self.scheduler.schedule(self.now_s)
        self.now_s += 0.01
        emitted = {c.request.request_id: 1 for c in batch.chunks if c.emits_token}
        stopped = frozenset(list(emitted)[: int(is_last)])
        self.scheduler.update(batch, StepResult(emitted, stopped), self.now_s)
        self.ended += self.scheduler.take_ended()

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        view = self.scheduler.view(self.now_s)
        queued = [*view.waiting, *view.running, *view.swapped]
        assert len({r.request_id for r in queued}) == len(queued)
        assert {r.request_id for r in queued} == {
            r.request_id for r in self.requests if not r.status.is_ended
        }
        assert all(r.status is RequestStatus.WAITING for r in view.waiting)
        assert all(r.status is RequestStatus.RUNNING for r in view.running)
        assert all(r.status is RequestStatus.SWAPPED for r in view.swapped)
        assert len(view.running) <= view.limits.max_num_seqs

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.kv.check()
        for request in self.requests:
            is_out = request.status is RequestStatus.SWAPPED
            blocks = -(-request.num_computed_tokens // BLOCK_SIZE)
            on_host = self.kv.num_held_host_blocks(request.request_id)
            on_device = self.kv.num_held_blocks(request.request_id)
            if request.status.is_ended:
                blocks = 0
            assert (on_device, on_host) == ((0, blocks) if is_out else (blocks, 0))

    @invariant()
    def progress_is_consistent(self) -> None:
        for request in self.requests:
            assert len(request.token_times_s) == request.num_output_tokens <= request.max_tokens
            assert len(request.output_token_ids) == request.num_output_tokens
            if not request.status.is_ended:
                assert request.num_uncomputed_tokens > 0

    def teardown(self) -> None:
        """Run until every request has ended, and check that each ended exactly once."""
        if not hasattr(self, "scheduler"):
            return
        self.change_policy("fcfs")
        for _ in range(5000):
            if not self.scheduler.num_unfinished:
                break
            self.step(is_last=False)
        self.ended += self.scheduler.take_ended()
        assert sorted(r.request_id for r in self.ended) == sorted(
            r.request_id for r in self.requests
        )
        assert all(r.status.is_ended and r.end_reason is not None for r in self.requests)
        assert self.kv.num_free_blocks == self.kv.num_blocks


SchedulerMachine.TestCase.settings = settings(stateful_step_count=40)
TestScheduler = SchedulerMachine.TestCase


def test_it_is_written_down_when_a_request_first_left_the_queue() -> None:
    bench = Bench()
    first, second = bench.add("first", 12), bench.add("second", 4)
    bench.step({"first": 8})
    bench.step({"first": 4, "second": 4})
    bench.step({"second": 1}, preempted=("first",))
    bench.step({"first": 8})
    assert (first.started_s, second.started_s) == (0.0, 1.0)
