"""vllm_v1 against scenarios that were run on vLLM 0.33, and its other options."""

from __future__ import annotations

from typing import Any

import pytest
from replica import Replica
from views import R, view_of

from slosched.core import Limits
from slosched.policy.engines.vllm_v0.policy import SchedulingPolicy
from slosched.policy.engines.vllm_v1.policy import VLLMV1

PRIORITY = SchedulingPolicy.PRIORITY


def v1(
    tokens: int, num_blocks: int = 100, seats: int = 8, loras: int | None = None, **options: Any
) -> Replica:
    return Replica(VLLMV1(**options), tokens, num_blocks, seats, loras)


def test_a_prompt_fills_the_step_and_goes_on_in_the_next() -> None:
    replica = v1(64)
    replica.add(("a", 60, 5), ("b", 60, 5))
    assert replica.steps(3) == [{"a": 60, "b": 4}, {"a": 1, "b": 56}, {"a": 1, "b": 1}]


def test_running_requests_are_served_in_their_order_not_decodes_first() -> None:
    replica = v1(8)
    replica.add(("a", 20, 5), ("b", 3, 5))
    assert replica.steps(4) == [{"a": 8}, {"a": 8}, {"a": 4, "b": 3}, {"a": 1, "b": 1}]


def test_the_youngest_is_preempted_and_nobody_starts_beside() -> None:
    replica = v1(64, num_blocks=4)
    replica.add(("a", 7, 8), ("b", 7, 8), ("c", 3, 8))
    assert replica.steps(3) == [{"a": 7, "b": 7}, {"a": 1, "b": 1}, {"a": 1}]
    assert replica.preempted == ("b",)
    assert replica.steps(6) == [{"a": 1}] * 5 + [{"b": 9, "c": 3}]


def test_priority_orders_the_queue_and_picks_the_victim() -> None:
    replica = v1(64, num_blocks=4, policy=PRIORITY)
    replica.add(("a", 7, 8, 5), ("b", 7, 8, 1))
    assert list(replica.step().items()) == [("b", 7), ("a", 7)]
    assert replica.steps(2) == [{"b": 1, "a": 1}, {"b": 1}]
    assert replica.preempted == ("a",)


def test_priority_takes_no_seat_from_a_running_request() -> None:
    replica = v1(64, seats=1, policy=PRIORITY)
    replica.add(("a", 4, 3, 5))
    replica.step()
    replica.add(("b", 4, 3, 0))
    assert replica.steps(3) == [{"a": 1}, {"a": 1}, {"b": 4}]


def test_a_long_prompt_is_cut_only_if_it_is_not_alone() -> None:
    alone = v1(64, long_prefill_token_threshold=16)
    alone.add(("a", 50, 2))
    assert alone.step() == {"a": 50}
    for adaptive, expected in (
        (False, [{"a": 16, "b": 10}, {"a": 16, "b": 1}, {"a": 18}]),
        (True, [{"a": 32, "b": 10}, {"a": 18, "b": 1}]),
    ):
        options = {"long_prefill_token_threshold_adaptive": adaptive}
        beside = v1(64, long_prefill_token_threshold=16, **options)
        beside.add(("a", 50, 2), ("b", 10, 2))
        assert beside.steps(len(expected)) == expected


@pytest.mark.parametrize("reserve", [True, False])
def test_a_prompt_that_does_not_fit_whole_waits_unless_told_not_to(reserve: bool) -> None:
    replica = v1(8, num_blocks=8, scheduler_reserve_full_isl=reserve)
    replica.add(("a", 20, 9))
    replica.steps(3)
    replica.add(("b", 16, 9))
    if reserve:
        assert replica.steps(2) == [{"a": 1}, {"a": 1}]
    else:
        assert replica.step() == {"a": 1, "b": 7}
        assert (replica.step(), replica.preempted) == ({"a": 1}, ("b",))
        assert replica.step() == {"a": 1, "b": 7}


def test_prompts_are_computed_in_every_fourth_step_while_decodes_run() -> None:
    replica = v1(64, prefill_schedule_interval=4)
    replica.add(("a", 4, 20))
    replica.steps(2)
    replica.add(("b", 4, 20))
    assert replica.steps(4) == [{"a": 1}, {"a": 1}, {"a": 1, "b": 4}, {"a": 1, "b": 1}]


def test_prompts_do_not_wait_for_their_turn_if_that_was_too_short_for_all() -> None:
    replica = v1(8, prefill_schedule_interval=4)
    replica.add(("a", 4, 20), ("b", 10, 20), ("c", 10, 20))
    # b and c are left over from step 0; none is in step 2, so the rest of c waits for step 4.
    assert replica.steps(3) == [{"a": 4, "b": 4}, {"a": 1, "b": 6, "c": 1}, {"a": 1, "b": 1}]
    assert replica.steps(2) == [{"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 6}]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    replica = v1(64, num_blocks=8)
    replica.add(("a", 23, 3), ("b", 12, 9), ("c", 3, 9))
    assert replica.steps(4) == [{"a": 23}, {"a": 1}, {"a": 1}, {"b": 12, "c": 3}]


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it() -> None:
    replica = v1(64, enable_chunked_prefill=False)
    replica.add(("a", 40, 3), ("b", 30, 9), ("c", 4, 9))
    assert replica.steps(2) == [{"a": 40}, {"a": 1, "b": 30, "c": 4}]


def test_without_chunks_what_no_step_holds_has_steps_for_itself() -> None:
    """vLLM would refuse such a configuration."""
    replica = v1(64, enable_chunked_prefill=False)
    replica.add(("a", 4, 2), ("b", 100, 9), ("c", 4, 9))
    assert replica.steps(4) == [{"a": 4}, {"a": 1}, {"b": 64}, {"b": 36, "c": 4}]


@pytest.mark.parametrize(("tokens", "starts"), [(16, True), (17, False)])
def test_the_watermark_is_left_free_where_somebody_runs(tokens: int, starts: bool) -> None:
    """int(0.2 * 11) = 2 of ten blocks, the null block counted; a holds four."""
    replica = v1(64, num_blocks=10, watermark=0.2)
    replica.add(("a", 16, 9), ("b", tokens, 9))
    assert ("b" in replica.step()) == starts
    alone = v1(64, num_blocks=10, watermark=0.2)
    alone.add(("b", 39, 1))
    assert alone.step() == {"b": 39}


def test_seats_may_be_fewer_than_the_host_has() -> None:
    replica = v1(64, max_num_active_seqs=2)
    replica.add(("a", 4, 2), ("b", 4, 9), ("c", 4, 9))
    assert replica.steps(3) == [{"a": 4, "b": 4}, {"a": 1, "b": 1}, {"b": 1, "c": 4}]


def test_who_finds_no_adapter_slot_is_overtaken_and_stays_first_in_line() -> None:
    replica = v1(64, loras=1)
    replica.add(("a", 4, 3), lora_id="x")
    replica.add(("b", 4, 9), lora_id="y")
    replica.add(("c", 4, 9))
    assert replica.step() == {"a": 4, "c": 4}
    replica.add(("d", 4, 9), lora_id="y")
    assert replica.steps(2) == [{"a": 1, "c": 1}, {"a": 1, "c": 1}]
    assert list(replica.step().items()) == [("c", 1), ("b", 4), ("d", 4)]


def test_a_victim_of_priority_may_have_its_part_in_the_step_already() -> None:
    """a, the first of the running ones, is the least urgent; its token of the step goes to c.

    Of five blocks, a and b hold two each, c one. b's token needs a third block, so a is preempted.
    The step's five tokens, of which a had one, then suffice for all of c's.
    """
    queue = [R("a", 6, 1.0, out=1, priority=9), R("b", 9, 1.0, out=1), R("c", 8, 1.0, done=4)]
    policy = VLLMV1(policy=PRIORITY)
    limits = Limits(max_num_batched_tokens=5)
    output = policy.schedule(view_of(queue, num_blocks=5, block_size=4, limits=limits))
    assert output.preempted == ("a",)
    assert list(output.num_scheduled_tokens.items()) == [("b", 1), ("c", 4)]


def test_who_has_to_go_itself_ends_the_search() -> None:
    """As in vLLM, c is not looked at, though its block has room."""
    queue = [
        R("a", 5, 1.0, out=1),
        R("b", 9, 1.0, out=1, priority=9),
        R("c", 7, 1.0, out=1, priority=1),
    ]
    policy = VLLMV1(policy=PRIORITY)
    output = policy.schedule(view_of(queue, num_blocks=6, block_size=4))
    assert (output.preempted, output.num_scheduled_tokens) == (("b",), {"a": 1})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("watermark", 1.0, r"\[0, 1\), not 1.0"),
        ("long_prefill_token_threshold", -1, "negative, not -1"),
        ("max_num_active_seqs", -2, "negative, not -2"),
        ("prefill_schedule_interval", 0, "at least 1, not 0"),
    ],
)
def test_impossible_options_are_refused(option: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMV1(**{option: value})  # type: ignore[arg-type]
