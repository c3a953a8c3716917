"""sglang against runs of SGLang 0.5.5 that were written down by hand, and where it differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from sglang_host import RadixKV, SGLangHere

from slosched.core import EndReason, Limits, Policy, Request, StepResult
from slosched.kv import HashIndex, KVCache
from slosched.policy import FCFS
from slosched.policy.engines.sglang.order import Order, SchedulePolicy
from slosched.policy.engines.sglang.policy import SGLang
from slosched.policy.spec import PolicySpecError, make_policy
from slosched.scheduler import Scheduler

Steps = list[list[tuple[str, int]]]
NEW = iter(range(10_000_000, 10**9))


def req(
    name: str,
    num_prompt_tokens: int,
    max_tokens: int,
    *,
    shared: Sequence[int] = (),
    priority: int = 0,
    lora_id: str | None = None,
) -> Request:
    """The request's own token ids follow those that are `shared`."""
    ids = [*shared, *(next(NEW) for _ in range(num_prompt_tokens - len(shared)))]
    return Request(
        *(name, 0.0, num_prompt_tokens, max_tokens),
        prompt_token_ids=ids,
        priority=priority,
        lora_id=lora_id,
    )


class Run:
    """A scenario, played step by step."""

    def __init__(
        self,
        policy: Policy,
        kv: KVCache | int,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 100_000,
        max_loras: int | None = None,
    ) -> None:
        self.policy = policy
        self.kv = KVCache(kv, block_size=1) if isinstance(kv, int) else kv
        if isinstance(policy, SGLangHere):
            assert isinstance(self.kv, RadixKV)
            policy.kv = self.kv
        limits = Limits(max_num_batched_tokens, max_num_seqs, max_loras=max_loras)
        self.scheduler = Scheduler(policy, self.kv, limits)
        self.now_s = 0.0

    def step(self, *arrivals: Request) -> list[tuple[str, int]]:
        """Return which requests compute how many tokens."""
        for request in arrivals:
            request.arrival_s = self.now_s
            self.scheduler.add_request(request)
        batch = self.scheduler.schedule(self.now_s)
        self.preempted = batch.output.preempted
        self.now_s += 1.0
        emitted = {c.request.request_id: 7 for c in batch.chunks if c.emits_token}
        self.scheduler.update(batch, StepResult(emitted), self.now_s)
        if isinstance(self.kv, RadixKV):
            self.kv.settle(batch, self.kv.launched)
        return list(batch.output.num_scheduled_tokens.items())

    def steps(self, count: int, arrivals: Mapping[int, Sequence[Request]]) -> Steps:
        return [self.step(*arrivals.get(index, ())) for index in range(count)]

    def to_the_end(self) -> int:
        """Return how many steps it takes."""
        count = 0
        while self.scheduler.num_unfinished:
            assert self.step() or self.preempted
            count += 1
        return count


def decodes(*names: str) -> list[tuple[str, int]]:
    return [(name, 1) for name in names]


def test_prompts_come_first_and_decodes_wait_meanwhile() -> None:
    policy = SGLang()
    run = Run(policy, 200)
    got = run.steps(7, {0: [req("a", 10, 6)], 2: [req("b", 10, 3)]})
    assert got == [
        *([("a", 10)], decodes("a"), [("b", 10)], decodes("a", "b"), decodes("a", "b")),
        *(decodes("a"), decodes("a")),
    ]
    assert round(policy._ratio.value, 5) == 0.69498


def test_a_prompt_is_cut_where_the_chunk_ends_and_goes_on_first() -> None:
    run = Run(SGLang(chunked_prefill_size=8), 200)
    got = run.steps(6, {0: [req("a", 20, 3), req("b", 5, 3)]})
    assert got == [
        *([("a", 8)], [("a", 8)], [("a", 4), ("b", 4)], [("b", 1)]),
        *(decodes("a", "b"), decodes("a", "b")),
    ]


def test_mixed_chunks_hold_the_decodes_too() -> None:
    run = Run(SGLang(chunked_prefill_size=8, enable_mixed_chunk=True), 200)
    got = run.steps(6, {0: [req("a", 5, 6)], 1: [req("b", 20, 4)]})
    assert got == [
        *([("a", 5)], [("b", 7), ("a", 1)], [("b", 7), ("a", 1)], [("b", 6), ("a", 1)]),
        *(decodes("b", "a"), decodes("b", "a")),
    ]


def test_who_is_admitted_depends_on_what_the_running_will_want() -> None:
    """b fits after a's first step, because SGLang then forgets "full"; c has to wait."""
    run = Run(SGLang(), 100)
    got = run.steps(4, {0: [req("a", 30, 60), req("b", 10, 10), req("c", 5, 5)]})
    assert got == [[("a", 30)], [("b", 10)], decodes("a", "b"), decodes("a", "b")]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    run = Run(SGLang(), 100)
    arrivals = {0: [req("r", 40, 50)], 1: [req("big", 20, 30), req("small", 2, 2)]}
    assert run.steps(3, arrivals) == [[("r", 40)], decodes("r"), decodes("r")]


def test_retracted_is_the_last_of_those_with_the_fewest_outputs() -> None:
    """Then all its known tokens are recomputed, when the others are done."""
    policy = SGLang(schedule_conservativeness=0.1)
    run = Run(policy, 100)
    for index, name in enumerate("abc"):
        run.step(req(name, 10, 40))
        assert (index, run.preempted) == (index, ())
    for _ in range(3, 26):
        run.step()
    assert run.step() == decodes("a", "b")
    assert run.preempted == ("c",)
    assert policy._ratio.value == 1.0
    for _ in range(27, 42):
        assert run.step() == decodes("a", "b")
    assert run.step() == [("c", 34)]
    assert policy._ratio.value == pytest.approx(0.07)


def test_of_equal_outputs_the_longest_prompt_is_retracted_even_if_it_is_the_oldest() -> None:
    run = Run(SGLang(schedule_conservativeness=0.1), 120)
    run.steps(25, {0: [req("a", 30, 40)], 1: [req("b", 10, 40)], 2: [req("c", 12, 40)]})
    assert run.step() == decodes("b", "c")
    assert run.preempted == ("a",)


def test_the_first_prompt_may_exceed_max_prefill_tokens() -> None:
    run = Run(SGLang(max_prefill_tokens=16, chunked_prefill_size=-1), 1000)
    got = run.steps(4, {0: [req("a", 20, 9), req("b", 10, 9), req("c", 6, 9), req("d", 5, 9)]})
    assert got == [[("a", 20)], [("b", 10)], [("c", 6), ("d", 5)], decodes(*"abcd")]


def test_the_largest_max_tokens_first() -> None:
    run = Run(SGLang(schedule_policy=SchedulePolicy.LOF), 1000, max_num_seqs=2)
    assert run.step(req("a", 10, 5), req("b", 10, 50), req("c", 10, 20)) == [("b", 10), ("c", 10)]


SPF = SchedulePolicy.SHORTEST_PREFILL_FIRST
SEED = tuple(range(40))


@pytest.mark.parametrize(
    "make_kv", [lambda: RadixKV(1000), lambda: KVCache(1000, 1, 0, HashIndex())]
)
def test_the_longest_cached_prefix_first(make_kv: Callable[[], KVCache]) -> None:
    """This holds with SGLang's own cache and with slosched's."""
    kv = make_kv()
    make = SGLangHere if isinstance(kv, RadixKV) else SGLang
    run = Run(make(schedule_policy=SchedulePolicy.LPM), kv, max_num_seqs=1)
    arrivals = [
        *(req("x", 100, 2), req("z", 30, 2, shared=SEED[:20]), req("y", 50, 2, shared=SEED)),
    ]
    got = run.steps(6, {0: [req("seed", 40, 2, shared=SEED)], 1: arrivals})
    assert got == [
        *([("seed", 40)], decodes("seed"), [("y", 10)], decodes("y"), [("z", 10)], decodes("z")),
    ]


@pytest.mark.parametrize(("num_shared", "order"), [(40, "p q r s"), (31, "p r q s")])
def test_a_prompt_that_begins_like_an_earlier_one_waits_for_it(num_shared: int, order: str) -> None:
    shared = SEED[:num_shared]
    waiting = [
        *(req("p", 45, 1, shared=shared), req("r", 45, 1, shared=shared), req("q", 10, 1)),
        req("s", 45, 1, shared=shared),
    ]
    Order(SchedulePolicy.LPM).sort(waiting)
    assert " ".join(r.request_id for r in waiting) == order


def test_random_is_the_same_disorder_in_every_run() -> None:
    orders = []
    for _ in range(2):
        waiting, order = [req(f"{i}", 1, 1) for i in range(50)], Order(SchedulePolicy.RANDOM)
        for _ in range(2):
            order.sort(waiting)
            orders.append([r.request_id for r in waiting])
    assert orders[:2] == orders[2:]
    assert orders[0] != orders[1]
    assert sorted(orders[0], key=int) == [f"{i}" for i in range(50)] != orders[0]


def test_prefix_hashes_of_a_trace_say_who_begins_alike() -> None:
    waiting = [req(name, 45, 1) for name in "pqr"]
    for request, hashes in zip(waiting, [(5, 6), (9, 9), (5, 6, 7)], strict=True):
        request.prompt_token_ids, request.prefix_hashes = None, hashes
        request.prefix_block_tokens = 16
    waiting[1:] = reversed(waiting[1:])
    Order(SchedulePolicy.LPM).sort(waiting)
    assert [r.request_id for r in waiting] == ["p", "q", "r"]


@pytest.mark.parametrize("num_waiting", [128, 129])
@pytest.mark.parametrize(
    ("policy", "gives_up"),
    [("lpm", True), ("dfs-weight", False), ("hrrn", True), ("shortest-prefill-first", False)],
)
def test_beyond_128_waiting_requests_two_orders_no_longer_look_for_prefixes(
    num_waiting: int, policy: str, gives_up: bool
) -> None:
    waiting = [req(f"w{i}", 10, 1) for i in range(num_waiting)]
    waiting[-1].num_computed_tokens = 9
    order = Order(SchedulePolicy(policy))
    order.follow(waiting)
    order.num_prefilled += 100
    order.sort(waiting)
    is_fcfs = gives_up and num_waiting > 128
    assert waiting[0].num_computed_tokens == (0 if is_fcfs else 9)


def test_depth_first_goes_where_most_requests_wait() -> None:
    trunk, other = tuple(range(20)), tuple(range(500, 520))
    one, two = trunk + tuple(range(30, 35)), trunk + tuple(range(40, 45))
    prefixes = {"b1": other, "a1": one, "a2x": two, "a2y": two}
    waiting = []
    for name, prefix in prefixes.items():
        request = req(name, len(prefix) + 1, 1, shared=prefix)
        request.num_computed_tokens = len(prefix)
        waiting.append(request)
    Order(SchedulePolicy.DFS_WEIGHT).sort(waiting)
    assert [r.request_id for r in waiting] == ["a2x", "a2y", "a1", "b1"]


def test_the_highest_response_ratio_first() -> None:
    """The tokens computed since each came, divided by its own uncached tokens, are 2, 4 and 2."""
    order, waiting = Order(SchedulePolicy.HRRN), [req("a", 300, 1)]
    order.follow(waiting)
    order.num_prefilled += 200
    waiting += [req("b", 110, 1), req("c", 200, 1)]
    waiting[1].num_computed_tokens = 10
    order.follow(waiting)
    order.num_prefilled += 400
    order.sort(waiting)
    assert [r.request_id for r in waiting] == ["b", "a", "c"]
    waiting[2].num_computed_tokens = 150  # c: 400 over 50
    order.sort(waiting)
    assert [r.request_id for r in waiting] == ["c", "b", "a"]


def test_what_comes_back_to_the_queue_has_waited_for_nothing_yet() -> None:
    order, waiting = Order(SchedulePolicy.HRRN), [req("a", 100, 1), req("b", 100, 1)]
    order.follow(waiting)
    order.num_prefilled += 100
    order.leave(waiting[:1])
    order.follow(waiting)
    order.sort(waiting)
    assert [r.request_id for r in waiting] == ["b", "a"]


def test_the_fewest_tokens_that_are_not_cached_first() -> None:
    """A prompt that shares a prefix with an earlier one goes last, however short; equals keep their
    order."""
    order = Order(SPF)
    waiting = [req("a", 100, 1), req("b", 90, 1), req("c", 60, 1), req("d", 40, 1)]
    waiting += [req("e", 45, 1, shared=SEED), req("f", 50, 1, shared=SEED)]
    waiting[0].num_computed_tokens = 60
    order.follow(waiting)
    waiting.reverse()  # f is before e now
    order.sort(waiting)
    assert [r.request_id for r in waiting] == ["a", "d", "f", "c", "b", "e"]


def test_the_cut_prompt_leaves_room_to_shorter_ones() -> None:
    """b and c take 10 and 12 of 32 tokens; the rest would cut d, but only one prompt may be cut."""
    run = Run(SGLang(schedule_policy=SPF, chunked_prefill_size=32), 1000)
    assert run.step(req("a", 100, 9)) == [("a", 32)]
    arrivals = [req("d", 40, 9), req("c", 12, 9), req("b", 10, 9)]
    assert run.step(*arrivals) == [("a", 10), ("b", 10), ("c", 12)]
    assert run.step() == [("a", 32)]
    assert run.step() == [("a", 26), ("d", 6)]
    assert run.step() == [("d", 32)]


def priorities() -> SGLangHere:
    return SGLangHere(enable_priority_scheduling=True, schedule_low_priority_values_first=False)


def test_the_urgent_drives_out_everybody_who_is_so_much_less_urgent() -> None:
    run = Run(priorities(), RadixKV(1000), max_num_seqs=2)
    run.step(req("l1", 10, 30), req("l2", 10, 30, priority=5))
    assert [run.step(), run.step()] == [decodes("l2", "l1")] * 2
    assert run.step(req("h", 10, 5, priority=20), req("m", 10, 5, priority=9)) == [("h", 10)]
    assert sorted(run.preempted) == ["l1", "l2"]
    assert run.step() == [("m", 10)]
    assert [run.step() for _ in range(4)] == [decodes("h", "m")] * 4
    assert run.step() == [("l2", 3), ("l1", 3)]


def test_not_for_a_difference_of_the_threshold_nor_for_memory() -> None:
    run = Run(priorities(), RadixKV(1000), max_num_seqs=1)
    run.step(req("l", 10, 30, priority=5))
    assert run.step(req("h", 10, 30, priority=15)) == decodes("l")
    run = Run(priorities(), RadixKV(60))
    run.step(req("l", 20, 30))
    assert run.step(req("h", 20, 30, priority=20)) == decodes("l")


@pytest.mark.parametrize("low_first", [False, True])
def test_which_priorities_come_first(low_first: bool) -> None:
    policy = SGLang(enable_priority_scheduling=True, schedule_low_priority_values_first=low_first)
    waiting = [req(f"p{p}", 10, 5, priority=p) for p in (1, 5, 3)]
    first = "p1" if low_first else "p5"
    assert Run(policy, 1000, max_num_seqs=1).step(*waiting) == [(first, 10)]


def test_the_search_ends_at_the_first_adapter_too_many() -> None:
    run = Run(SGLang(), 1000, max_loras=1)
    got = run.steps(
        5,
        {0: [req(n, 10, 3, lora_id=lora) for n, lora in zip("abc", ("x", "y", "x"), strict=True)]},
    )
    assert got == [[("a", 10)], decodes("a"), decodes("a"), [("b", 10)], decodes("b")]


def test_who_would_fill_the_whole_cache_runs_alone_where_sglang_waits_for_ever() -> None:
    run = Run(SGLang(), 100)
    assert run.step(req("a", 30, 70), req("b", 5, 5)) == [("a", 30)]
    assert run.to_the_end() <= 80


def test_a_prompt_longer_than_a_step_is_computed_in_chunks() -> None:
    run = Run(SGLang(chunked_prefill_size=-1), 1000, max_num_batched_tokens=16)
    got = run.steps(4, {0: [req("a", 40, 5)]})
    assert got == [[("a", 16)], [("a", 16)], [("a", 8)], decodes("a")]


def test_a_chunk_is_of_whole_pages() -> None:
    """Besides one decode, 7 tokens are left of the chunk, which hold one page of 4."""
    policy = SGLang(enable_mixed_chunk=True, chunked_prefill_size=8)
    run = Run(policy, KVCache(100, block_size=4))
    run.step(req("a", 4, 30))
    assert run.step(req("b", 6, 5)) == [("b", 4), ("a", 1)]
    assert run.step() == [("b", 2), ("a", 1)]


def test_a_cut_prompt_that_another_policy_ends_decodes_with_the_others() -> None:
    fcfs, sglang = FCFS(), SGLang()
    run = Run(fcfs, KVCache(3, block_size=16), max_num_batched_tokens=18)
    assert run.step(req("a", 17, 8), req("b", 3, 8)) == [("a", 17), ("b", 1)]
    run.scheduler.policy = sglang
    assert run.step() == decodes("a"), "a chunk of b wants a free block"
    run.scheduler.policy = fcfs
    assert run.step() == [("a", 1), ("b", 2)]
    run.scheduler.policy = sglang
    assert run.steps(2, {}) == [decodes("a", "b")] * 2, "a decode of b needs none"


def test_it_takes_over_from_another_policy_in_the_middle() -> None:
    """Of several prompts that have begun, one goes on after the other."""
    run = Run(FCFS(), 1000, max_num_batched_tokens=16)
    run.step(req("a", 4, 9))
    run.step(req("b", 40, 9), req("c", 40, 9))
    run.scheduler.policy = run.policy = SGLang(chunked_prefill_size=8)
    assert run.step() == [("b", 8)]
    assert run.to_the_end() < 60


@pytest.mark.parametrize(
    ("spec", "refused"),
    [
        ("sglang:max_queued_requests=2", "c d e"),
        (
            "sglang:max_queued_requests=2,enable_priority_scheduling=true"
            ",schedule_low_priority_values_first=false",
            "b d e",
        ),
    ],
)
def test_who_finds_the_queue_full_is_refused_or_drives_out_the_least_urgent(
    spec: str, refused: str
) -> None:
    """SGLang decides this about the waiting and the new requests before it starts any."""
    run = Run(make_policy(spec), 1000, max_num_seqs=1)
    priorities = {"a": 5, "b": 1, "c": 3, "d": 1, "e": 3}
    arrivals = [req(name, 10, 30, priority=priority) for name, priority in priorities.items()]
    run.step(req("first", 10, 3, priority=9))
    run.step(*arrivals[:3])
    run.step(*arrivals[3:])
    run.to_the_end()
    ended = {r.request_id: r.end_reason for r in run.scheduler.take_ended()}
    away = [name for name, reason in ended.items() if reason is EndReason.QUEUE_FULL]
    assert " ".join(sorted(away)) == refused
    assert len(ended) == 6


def test_who_was_retracted_counts_in_the_queue_but_stays() -> None:
    run = Run(SGLang(schedule_conservativeness=0.1, max_queued_requests=1), 100)
    run.steps(26, {i: [req(name, 10, 40)] for i, name in enumerate("abc")})
    run.step()
    assert run.preempted == ("c",)
    run.step(req("d", 10, 5))
    run.to_the_end()
    ended = {r.request_id: r.end_reason for r in run.scheduler.take_ended()}
    assert ended == {**dict.fromkeys("abc", EndReason.LENGTH), "d": EndReason.QUEUE_FULL}


def test_somebody_gone_in_the_middle_of_a_chunk_leaves_nothing_behind() -> None:
    run = Run(SGLang(chunked_prefill_size=8), 1000)
    assert run.step(req("a", 40, 9), req("b", 10, 2)) == [("a", 8)]
    run.scheduler.end("a", EndReason.CLIENT, run.now_s)
    assert run.step() == [("b", 8)]
    run.to_the_end()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("schedule_conservativeness=0", "positive, not 0"),
        ("max_prefill_tokens=0", "max_prefill_tokens must be >= 1, not 0"),
        ("max_waiting_for_prefixes=0", "max_waiting_for_prefixes must be >= 1, not 0"),
        ("max_queued_requests=-1", "max_queued_requests must be >= 1, or 0"),
        ("chunked_prefill_size=0", "chunked_prefill_size must be >= 1, or -1"),
        ("schedule_policy=lpm,enable_priority_scheduling=true", "fcfs or lof, not lpm"),
        ("schedule_policy=srtf", "srtf"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: str, said: str) -> None:
    with pytest.raises((ValueError, PolicySpecError), match=said):
        make_policy(f"sglang:{options}")
