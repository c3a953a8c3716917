"""Every limit of a step holds exactly, and the builder grants all that the limits allow."""

from __future__ import annotations

import math

import pytest
from factories import make_model
from hypothesis import given
from hypothesis import strategies as st

from slosched.batch import BatchBuilder
from slosched.core import (
    BatchShape,
    EndReason,
    LatencyModel,
    Limits,
    PreemptionMode,
    Request,
    RequestStatus,
    SchedulerView,
)
from slosched.core.merged_blocks import repeated_in
from slosched.kv import KVCache
from slosched.perfmodel import LinearModel
from slosched.policy.engines.vllm_v0.builder import RepeatingBuilder

BLOCK_SIZE = 4
SWAP = PreemptionMode.SWAP


def put(
    kv: KVCache,
    name: str,
    num_tokens: int,
    num_computed_tokens: int = 0,
    status: RequestStatus | None = None,
    lora_id: str | None = None,
) -> Request:
    """Return a request of `num_tokens` known tokens, running if some are computed, else waiting."""
    request = Request(name, 0.0, num_tokens, max_tokens=100, lora_id=lora_id)
    request.num_computed_tokens = num_computed_tokens
    request.status = status or (
        RequestStatus.RUNNING if num_computed_tokens else RequestStatus.WAITING
    )
    if num_computed_tokens:
        kv.grow(name, num_computed_tokens)
    if request.status is RequestStatus.SWAPPED:
        kv.swap_out(name)
    return request


def make_view(
    kv: KVCache,
    *requests: Request,
    limits: Limits | None = None,
    model: LatencyModel | None = None,
) -> SchedulerView:
    def those(status: RequestStatus) -> tuple[Request, ...]:
        return tuple(r for r in requests if r.status is status)

    return SchedulerView(
        now_s=0.0,
        waiting=those(RequestStatus.WAITING),
        running=those(RequestStatus.RUNNING),
        swapped=those(RequestStatus.SWAPPED),
        kv=kv,
        limits=limits or Limits(),
        latency_model=model,
    )


@pytest.mark.parametrize(("num_tokens", "granted"), [(9, 9), (10, 10), (11, 10)])
def test_a_chunk_is_cut_to_the_tokens_of_the_step(num_tokens: int, granted: int) -> None:
    kv = KVCache(64, BLOCK_SIZE)
    request = put(kv, "a", num_tokens)
    batch = BatchBuilder(make_view(kv, request, limits=Limits(max_num_batched_tokens=10)))
    assert batch.add(request) == granted
    assert batch.num_free_tokens == 10 - granted
    assert batch.build().num_scheduled_tokens == {"a": granted}


def test_nothing_is_granted_when_no_token_is_left() -> None:
    kv = KVCache(64, BLOCK_SIZE)
    first, second = put(kv, "a", 10), put(kv, "b", 1)
    batch = BatchBuilder(make_view(kv, first, second, limits=Limits(max_num_batched_tokens=10)))
    batch.add(first)
    assert batch.add(second) == 0
    assert second not in batch


@pytest.mark.parametrize(("budget", "granted"), [(0, 0), (7, 7), (10, 10), (11, 10)])
def test_a_token_budget_tightens_the_limit_but_never_loosens_it(budget: int, granted: int) -> None:
    kv = KVCache(64, BLOCK_SIZE)
    request = put(kv, "a", 50)
    view = make_view(kv, request, limits=Limits(max_num_batched_tokens=10))
    assert BatchBuilder(view, token_budget=budget).add(request) == granted


@pytest.mark.parametrize(("max_new_tokens", "granted"), [(0, 0), (1, 1), (8, 8), (9, 8)])
def test_a_caller_may_ask_for_less_than_the_rest(max_new_tokens: int, granted: int) -> None:
    kv = KVCache(64, BLOCK_SIZE)
    request = put(kv, "a", 11, num_computed_tokens=3)
    assert BatchBuilder(make_view(kv, request)).add(request, max_new_tokens) == granted


def test_a_request_is_granted_tokens_once_a_step() -> None:
    kv = KVCache(64, BLOCK_SIZE)
    request = put(kv, "a", 10)
    batch = BatchBuilder(make_view(kv, request))
    assert batch.add(request, 4) == 4
    assert batch.add(request) == 0
    assert batch.num_scheduled_tokens == {"a": 4}


@pytest.mark.parametrize(
    ("num_computed_tokens", "num_free_blocks", "granted"),
    [
        pytest.param(0, 0, 0, id="no block"),
        pytest.param(0, 1, 4, id="one block"),
        pytest.param(0, 3, 12, id="to the last slot of the last block"),
        pytest.param(0, 5, 20, id="exactly enough"),
        pytest.param(0, 6, 20, id="one too many"),
        pytest.param(4, 0, 0, id="own block is full"),
        pytest.param(5, 0, 3, id="the rest of its own block"),
        pytest.param(7, 0, 1, id="one slot of its own block"),
        pytest.param(5, 2, 11, id="its own block and two more"),
    ],
)
def test_a_chunk_is_cut_to_the_kv_blocks(
    num_computed_tokens: int, num_free_blocks: int, granted: int
) -> None:
    kv = KVCache(num_free_blocks + -(-num_computed_tokens // BLOCK_SIZE) or 1, BLOCK_SIZE)
    request = put(kv, "a", 20, num_computed_tokens)
    if num_free_blocks < kv.num_free_blocks:
        kv.grow("other", (kv.num_free_blocks - num_free_blocks) * BLOCK_SIZE)
    batch = BatchBuilder(make_view(kv, request))
    assert batch.add(request) == granted
    before = -(-num_computed_tokens // BLOCK_SIZE)
    after = -(-(num_computed_tokens + granted) // BLOCK_SIZE) if granted else before
    assert batch.num_free_blocks == num_free_blocks - (after - before)


@given(
    computed=st.integers(0, 30),
    rest=st.integers(1, 40),
    free_blocks=st.integers(0, 12),
    tokens=st.integers(1, 50),
)
def test_what_is_granted_fits_and_one_token_more_would_not(
    computed: int, rest: int, free_blocks: int, tokens: int
) -> None:
    held = -(-computed // BLOCK_SIZE)
    kv = KVCache(held + free_blocks + 1, BLOCK_SIZE)
    kv.grow("other", 1)
    request = put(kv, "a", computed + rest, computed)
    view = make_view(kv, request, limits=Limits(max_num_batched_tokens=tokens))
    room = (held + free_blocks) * BLOCK_SIZE - computed
    assert BatchBuilder(view).add(request) == min(rest, tokens, room)


@pytest.mark.parametrize(("min_new_tokens", "granted"), [(7, 8), (8, 8), (9, 0)])
def test_a_chunk_that_blocks_cut_below_the_minimum_is_not_granted(
    min_new_tokens: int, granted: int
) -> None:
    kv = KVCache(2, BLOCK_SIZE)
    request = put(kv, "a", 20)
    batch = BatchBuilder(make_view(kv, request))
    assert batch.add(request, min_new_tokens=min_new_tokens) == granted
    assert batch.num_free_blocks == (0 if granted else 2)


def test_the_end_of_a_prompt_may_be_shorter_than_the_minimum() -> None:
    kv = KVCache(8, BLOCK_SIZE)
    request = put(kv, "a", 20, num_computed_tokens=17)
    assert BatchBuilder(make_view(kv, request)).add(request, min_new_tokens=16) == 3


@pytest.mark.parametrize(("max_num_seqs", "granted"), [(1, 0), (2, 6), (3, 6)])
def test_a_waiting_request_needs_a_seat(max_num_seqs: int, granted: int) -> None:
    kv = KVCache(64, BLOCK_SIZE)
    running, waiting = put(kv, "a", 6, 5), put(kv, "b", 6)
    batch = BatchBuilder(make_view(kv, running, waiting, limits=Limits(max_num_seqs=max_num_seqs)))
    assert batch.add(running) == 1
    assert batch.add(waiting) == granted
    assert batch.num_free_seqs == max_num_seqs - 1 - (granted > 0)


@pytest.mark.parametrize("leave", ["preempt", "reject"])
def test_who_leaves_gives_up_seat_and_blocks(leave: str) -> None:
    kv = KVCache(3, BLOCK_SIZE)
    running, waiting = put(kv, "a", 20, 12), put(kv, "b", 12)
    batch = BatchBuilder(make_view(kv, running, waiting, limits=Limits(max_num_seqs=1)))
    assert batch.add(waiting) == 0
    if leave == "preempt":
        batch.preempt(running)
    else:
        batch.reject(running, EndReason.EXPIRED)
    assert batch.has_left(running)
    assert batch.add(running) == 0
    assert batch.add(waiting) == 12


def test_a_rejected_waiting_request_frees_nothing() -> None:
    kv = KVCache(3, BLOCK_SIZE)
    waiting = put(kv, "a", 6)
    batch = BatchBuilder(make_view(kv, waiting, limits=Limits(max_num_seqs=4)))
    batch.reject(waiting, EndReason.CASCADE)
    assert (batch.num_free_seqs, batch.num_free_blocks) == (4, 3)
    assert batch.build().rejected == {"a": EndReason.CASCADE}


@pytest.mark.parametrize("already", ["scheduled", "preempted", "rejected"])
def test_a_request_has_one_fate_a_step(already: str) -> None:
    kv = KVCache(8, BLOCK_SIZE)
    request = put(kv, "a", 6, 5)
    batch = BatchBuilder(make_view(kv, request))
    {
        "scheduled": lambda: batch.add(request),
        "preempted": lambda: batch.preempt(request),
        "rejected": lambda: batch.reject(request, EndReason.EXPIRED),
    }[already]()
    with pytest.raises(ValueError, match="'a' is already part of this step"):
        batch.preempt(request)
    with pytest.raises(ValueError, match="'a' is already part of this step"):
        batch.reject(request, EndReason.EXPIRED)


@pytest.mark.parametrize(("limit", "granted"), [(None, 1), (0, 0), (2, 0), (3, 1), (4, 1)])
def test_a_swapped_request_comes_back_within_the_swap_traffic(
    limit: int | None, granted: int
) -> None:
    kv = KVCache(8, BLOCK_SIZE, num_host_blocks=8)
    request = put(kv, "a", 10, 9, RequestStatus.SWAPPED)
    batch = BatchBuilder(make_view(kv, request, limits=Limits(max_num_swapped_blocks=limit)))
    assert batch.add(request) == granted
    assert batch.build().swapped_in == (("a",) if granted else ())
    assert batch.shape.num_swapped_blocks == 3 * granted
    assert batch.num_free_blocks == 8 - 3 * granted


@pytest.mark.parametrize(("num_blocks", "granted"), [(3, 0), (4, 1)])
def test_a_swapped_request_needs_blocks_for_all_that_it_brings_back(
    num_blocks: int, granted: int
) -> None:
    kv = KVCache(4, BLOCK_SIZE, num_host_blocks=8)
    request = put(kv, "a", 13, 12, RequestStatus.SWAPPED)
    if num_blocks < 4:
        kv.grow("other", 1)
    assert BatchBuilder(make_view(kv, request)).add(request) == granted


def test_swapping_out_and_in_share_one_traffic_limit() -> None:
    kv = KVCache(6, BLOCK_SIZE, num_host_blocks=8)
    back = put(kv, "back", 10, 9, RequestStatus.SWAPPED)
    victim = put(kv, "victim", 9, 8)
    limits = Limits(max_num_swapped_blocks=4, preemption_mode=SWAP)
    batch = BatchBuilder(make_view(kv, back, victim, limits=limits))
    batch.preempt(victim)
    assert batch.build().swapped_out == ("victim",)
    assert batch.add(back) == 0, "2 of 4 blocks are left, 3 are needed"


@pytest.mark.parametrize(
    ("num_host_blocks", "traffic", "is_swapped"),
    [(2, None, True), (1, None, False), (8, 2, True), (8, 1, False), (0, None, False)],
)
def test_preempting_swaps_only_where_the_host_and_the_traffic_have_room(
    num_host_blocks: int, traffic: int | None, is_swapped: bool
) -> None:
    kv = KVCache(6, BLOCK_SIZE, num_host_blocks)
    victim = put(kv, "a", 9, 8)
    limits = Limits(max_num_swapped_blocks=traffic, preemption_mode=SWAP)
    batch = BatchBuilder(make_view(kv, victim, limits=limits))
    batch.preempt(victim)
    output = batch.build()
    assert output.swapped_out == (("a",) if is_swapped else ())
    assert output.preempted == (() if is_swapped else ("a",))
    assert batch.shape.num_swapped_blocks == (2 if is_swapped else 0)
    assert batch.num_free_blocks == 6


def test_preempting_by_recompute_never_touches_the_host() -> None:
    kv = KVCache(6, BLOCK_SIZE, num_host_blocks=8)
    victim = put(kv, "a", 9, 8)
    batch = BatchBuilder(make_view(kv, victim))
    batch.preempt(victim)
    assert batch.build().preempted == ("a",)
    assert batch.num_free_host_blocks == 8


def test_a_second_swap_out_sees_what_the_first_took() -> None:
    kv = KVCache(8, BLOCK_SIZE, num_host_blocks=3)
    first, second = put(kv, "a", 9, 8), put(kv, "b", 9, 8)
    batch = BatchBuilder(make_view(kv, first, second, limits=Limits(preemption_mode=SWAP)))
    batch.preempt(first)
    batch.preempt(second)
    assert (batch.swapped_out, batch.preempted) == (["a"], ["b"])


@pytest.mark.parametrize(("max_loras", "served"), [(None, "wxyz"), (1, "wxz"), (2, "wxyz")])
def test_a_step_uses_at_most_so_many_adapters(max_loras: int | None, served: str) -> None:
    """Requests without an adapter, and more requests of the same adapter, take no slot."""
    kv = KVCache(8, BLOCK_SIZE)
    adapters = {"w": "l1", "x": "l1", "y": "l2", "z": None}
    requests = [put(kv, name, 2, lora_id=lora) for name, lora in adapters.items()]
    batch = BatchBuilder(make_view(kv, *requests, limits=Limits(max_loras=max_loras)))
    assert "".join(r.request_id for r in requests if batch.add(r)) == served


@given(
    time_limit_s=st.floats(0.0, 0.1),
    computed=st.integers(0, 40),
    rest=st.integers(1, 150),
    least=st.integers(1, 64),
    num_decodes=st.integers(0, 3),
)
def test_a_chunk_is_the_largest_below_the_time_limit(
    time_limit_s: float, computed: int, rest: int, least: int, num_decodes: int
) -> None:
    # A chunk of one token counts as a decode, which must not cost more than a chunk of two.
    model = make_model(2e-4, per_attention_s=1e-6, per_tile_s=4e-3, any_decode_s=0)
    kv = KVCache(200, BLOCK_SIZE)
    decodes = [put(kv, f"d{i}", 8, 7) for i in range(num_decodes)]
    request = put(kv, "a", computed + rest, computed)
    batch = BatchBuilder(make_view(kv, *decodes, request, model=model))
    for decode in decodes:
        batch.add(decode)
    batch.time_limit_s = time_limit_s
    before = batch.shape.copy()

    def time_s(n: int) -> float:
        shape = before.copy()
        shape.add(n, computed)
        return model.predict(shape)

    fitting = [n for n in range(min(rest, least), rest + 1) if time_s(n) < time_limit_s]
    granted = batch.add(request, min_new_tokens=least)
    assert granted == max(fitting, default=0)
    if granted:
        before.add(granted, computed)
    assert batch.shape == before
    assert batch.predicted_s == model.predict(before)


def test_the_time_limit_is_strict() -> None:
    model = make_model(per_token_s=0.25, constant_s=1.0, per_attention_s=0, per_tile_s=0)
    kv = KVCache(8, BLOCK_SIZE)
    request = put(kv, "a", 4)
    view = make_view(kv, request, model=model)
    assert BatchBuilder(view, time_limit_s=2.0).add(request) == 3
    assert BatchBuilder(view, time_limit_s=math.nextafter(2.0, 3.0)).add(request) == 4


def test_a_cautious_batch_stays_below_the_limit_by_the_upper_time() -> None:
    """The time is a quarter longer than predicted if the prediction is 20 % too short."""
    expected = make_model(per_token_s=0.25, constant_s=1.0, per_attention_s=0, per_tile_s=0)
    model = LinearModel(expected.coefficients, held_out_error={"under_p99": 20.0})
    kv = KVCache(8, BLOCK_SIZE)
    request = put(kv, "a", 4)
    view = make_view(kv, request, model=model)
    cautious = BatchBuilder(view, time_limit_s=2.0, cautious=True)
    assert cautious.add(request) == 2
    assert cautious.predicted_s == pytest.approx(1.25 * 1.5)
    assert BatchBuilder(view, time_limit_s=2.0).add(request) == 3


def test_bringing_a_request_back_takes_time_too() -> None:
    model = make_model(per_swapped_block_s=1.0)
    kv = KVCache(8, BLOCK_SIZE, num_host_blocks=8)
    request = put(kv, "a", 10, 9, RequestStatus.SWAPPED)
    view = make_view(kv, request, model=model)
    assert BatchBuilder(view, time_limit_s=3.0).add(request) == 0
    late = BatchBuilder(view, time_limit_s=3.1)
    assert late.add(request) == 1
    assert late.predicted_s == pytest.approx(3.0 + model.predict_prefill(1, 9))


def test_a_time_limit_without_a_latency_model_is_an_error_that_says_so() -> None:
    kv = KVCache(8, BLOCK_SIZE)
    request = put(kv, "a", 10)
    with pytest.raises(ValueError, match="give the scheduler a latency model"):
        BatchBuilder(make_view(kv, request), time_limit_s=1.0).add(request)


def test_the_rest_of_a_request_can_be_predicted_without_adding_it() -> None:
    model = make_model()
    kv = KVCache(64, BLOCK_SIZE)
    decode, prompt = put(kv, "d", 8, 7), put(kv, "p", 30, 10)
    batch = BatchBuilder(make_view(kv, decode, prompt, model=model))
    batch.add(decode)
    expected = BatchShape()
    expected.add(1, 7)
    expected.add(20, 10)
    assert batch.predict_with_rest_of(prompt) == model.predict(expected)
    assert prompt not in batch
    assert batch.shape.num_prefills == 0


@pytest.mark.parametrize(
    ("num_blocks", "reserved", "granted"),
    [(5, 0, 8), (4, 0, 0), (6, 1, 8), (5, 1, 0), (5, 5, 0)],
)
def test_a_prompt_is_admitted_only_if_all_of_it_fits_beside_what_is_reserved(
    num_blocks: int, reserved: int, granted: int
) -> None:
    """17 tokens take 5 blocks, although the step computes no more than 8 of them."""
    kv = KVCache(num_blocks, BLOCK_SIZE)
    request = put(kv, "a", 17)
    batch = BatchBuilder(make_view(kv, request, limits=Limits(max_num_batched_tokens=8)))
    assert batch.fits_whole(request, reserved) == bool(granted)
    assert batch.admit(request, reserved_blocks=reserved) == granted
    assert batch.num_free_blocks == num_blocks - (2 if granted else 0)


def test_blocks_are_promised_to_prompts_that_have_begun() -> None:
    kv = KVCache(64, BLOCK_SIZE)
    begun, decode, left = put(kv, "a", 20, 6), put(kv, "b", 9, 8), put(kv, "c", 20, 4)
    batch = BatchBuilder(make_view(kv, begun, decode, left))
    assert batch.blocks_promised([begun]) == 3, "20 tokens are 5 blocks, 2 are held"
    assert batch.blocks_promised([decode]) == 0
    assert batch.blocks_promised([begun, left]) == 3 + 4
    batch.preempt(left)
    assert batch.blocks_promised([begun, left]) == 3
    batch.add(begun, 7)
    assert batch.blocks_promised([begun]) == 1, "13 tokens hold 4 of the 5 blocks"


def test_room_is_made_from_the_back_and_only_as_much_as_needed() -> None:
    kv = KVCache(6, BLOCK_SIZE)
    requests = [put(kv, name, 9, 8) for name in "abc"]
    batch = BatchBuilder(make_view(kv, *requests))
    victims = list(requests)
    assert batch.make_room(requests[0], 1, victims)
    assert batch.preempted == ["c"]
    assert victims == requests[:2]
    assert batch.make_room(requests[0], 1, victims), "there is room already"
    assert batch.preempted == ["c"]


def test_who_is_last_goes_itself_when_there_is_no_room() -> None:
    kv = KVCache(4, BLOCK_SIZE)
    first, last = put(kv, "a", 9, 8), put(kv, "b", 9, 8)
    batch = BatchBuilder(make_view(kv, first, last))
    victims = [first, last]
    assert not batch.make_room(last, 1, victims)
    assert batch.preempted == ["b"]
    assert victims == [first]


def test_decodes_are_served_in_order_and_the_last_pay_for_it() -> None:
    kv = KVCache(8, BLOCK_SIZE)
    requests = [put(kv, name, 9, 8) for name in "abcd"]
    batch = BatchBuilder(make_view(kv, *requests))
    batch.add_preempting(requests, victims=list(requests))
    assert batch.build().num_scheduled_tokens == {"a": 1, "b": 1}
    assert batch.preempted == ["d", "c"]
    assert batch.num_free_blocks == 2
    assert batch.shape.num_decodes == 2


@given(
    contexts=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    spare_blocks=st.integers(0, 4),
    max_tokens=st.integers(1, 14),
    mode=st.sampled_from(PreemptionMode),
)
def test_adding_decodes_at_once_is_adding_them_one_by_one(
    contexts: list[int], spare_blocks: int, max_tokens: int, mode: PreemptionMode
) -> None:
    held = sum(-(-context // BLOCK_SIZE) for context in contexts)
    kv = KVCache(held + spare_blocks, BLOCK_SIZE, num_host_blocks=8)
    decodes = [put(kv, f"d{i}", context + 1, context) for i, context in enumerate(contexts)]
    limits = Limits(max_num_batched_tokens=max_tokens, preemption_mode=mode)
    view = make_view(kv, *decodes, limits=limits)
    at_once, one_by_one = BatchBuilder(view), BatchBuilder(view)
    at_once.add_preempting(decodes, victims=list(decodes))
    victims = list(decodes)
    for request in decodes:
        is_out = one_by_one.has_left(request) or one_by_one.num_free_tokens == 0
        if not is_out and one_by_one.make_room(request, 1, victims):
            assert one_by_one.add(request) == 1
    assert at_once.build() == one_by_one.build()
    for name in ("num_free_tokens", "num_free_blocks", "num_free_seqs", "num_free_host_blocks"):
        assert getattr(at_once, name) == getattr(one_by_one, name)


def test_a_prompt_takes_all_its_blocks_by_preempting_or_none() -> None:
    kv = KVCache(5, BLOCK_SIZE)
    prompt, decode = put(kv, "a", 20, 4), put(kv, "b", 9, 8)
    batch = BatchBuilder(make_view(kv, prompt, decode))
    batch.add_preempting([prompt, decode], victims=[prompt, decode])
    assert batch.num_scheduled_tokens == {"a": 16}
    assert batch.preempted == ["b"]


def test_building_a_step_changes_no_request_and_no_block() -> None:
    kv = KVCache(5, BLOCK_SIZE, num_host_blocks=4)
    prompt, decode = put(kv, "a", 20, 4), put(kv, "b", 9, 8)
    view = make_view(kv, prompt, decode, limits=Limits(preemption_mode=SWAP))
    batch = BatchBuilder(view)
    batch.add_preempting([prompt, decode], victims=[prompt, decode])
    batch.build()
    assert (kv.num_free_blocks, kv.num_free_host_blocks) == (2, 4)
    assert (prompt.num_computed_tokens, decode.num_computed_tokens) == (4, 8)
    assert decode.status is RequestStatus.RUNNING


def test_a_repeated_token_takes_a_place_and_a_seat_but_no_block() -> None:
    kv = KVCache(4, BLOCK_SIZE)
    begun, new = put(kv, "begun", 16, num_computed_tokens=8), put(kv, "new", 4)
    batch = RepeatingBuilder(make_view(kv, begun, new, limits=Limits(max_num_batched_tokens=1)))
    with pytest.raises(ValueError, match="'new' has no computed token"):
        batch.repeat(new)
    assert batch.repeat(begun) == 1
    assert (batch.num_free_tokens, batch.num_free_blocks) == (0, 2)
    assert batch.shape.max_decode_context_tokens == 8
    assert batch.repeat(begun) == batch.add(begun) == 0
    output = batch.build()
    assert (output.num_scheduled_tokens, repeated_in(output)) == ({"begun": 1}, {"begun"})


def test_the_order_of_the_plan_is_the_order_of_asking() -> None:
    kv = KVCache(64, BLOCK_SIZE)
    requests = [put(kv, name, 4) for name in "abc"]
    batch = BatchBuilder(make_view(kv, *requests))
    for request in reversed(requests):
        batch.add(request)
    assert list(batch.build().num_scheduled_tokens) == ["c", "b", "a"]
