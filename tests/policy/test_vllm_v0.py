"""vllm_v0 against runs of vLLM 0.6.3 that were written down by hand, and where it differs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from slosched.core import (
    EndReason,
    Limits,
    Policy,
    PreemptionMode,
    Request,
    SchedulerOutput,
    SchedulerView,
    StepResult,
)
from slosched.kv import KVCache, MergedIndex
from slosched.policy import Sarathi
from slosched.policy.engines.vllm_v0.policy import VLLMV0, SchedulingPolicy
from slosched.policy.spec import PolicySpecError, make_policy
from slosched.scheduler import Scheduler
from slosched.testing import check_policy


class Player:
    """A scheduler whose steps can be read: `a8 b4* c1` are its chunks, `*` emits no token.

    Then, if there are any: `-b` preempted, `>b` swapped out, `<b` swapped in, `!b` rejected.
    """

    def __init__(
        self,
        policy: VLLMV0 | None = None,
        *,
        tokens: int = 64,
        seqs: int = 8,
        blocks: int = 100,
        host_blocks: int = 0,
        swap: bool = False,
        max_loras: int | None = None,
        block_size: int = 4,
        caches_prefixes: bool = False,
    ) -> None:
        mode = PreemptionMode.SWAP if swap else PreemptionMode.RECOMPUTE
        limits = Limits(tokens, seqs, max_loras=max_loras, preemption_mode=mode)
        index = MergedIndex() if caches_prefixes else None
        self.kv = KVCache(blocks, block_size, host_blocks, index)
        self.scheduler = Scheduler(policy or VLLMV0(), self.kv, limits)
        self.num_requests = 0

    def add(
        self,
        name: str,
        tokens: int,
        max_tokens: int = 8,
        *,
        arrival_s: float | None = None,
        priority: int = 0,
        lora_id: str | None = None,
        begins: int = 0,
    ) -> Request:
        """Prompts that begin with the same number are equal from there on."""
        self.num_requests += 1
        arrival_s = float(self.num_requests) if arrival_s is None else arrival_s
        request = Request(
            *(name, arrival_s, tokens, max_tokens),
            priority=priority,
            lora_id=lora_id,
            prompt_token_ids=[begins or 1000 * self.num_requests, *range(1, tokens)],
        )
        self.scheduler.add_request(request)
        return request

    def step(self, now_s: float = 0.0) -> str:
        batch = self.scheduler.schedule(now_s)
        emitted = {c.request.request_id: 7 for c in batch.chunks if c.emits_token}
        self.scheduler.update(batch, StepResult(emitted), now_s)
        self.kv.check()
        output = batch.output
        words = [
            f"{c.request.request_id}{c.num_new_tokens}{'' if c.emits_token else '*'}"
            for c in batch.chunks
        ]
        signs = {
            "-": output.preempted,
            ">": output.swapped_out,
            "<": output.swapped_in,
            "!": output.rejected,
        }
        return " ".join(words + [sign + name for sign, names in signs.items() for name in names])

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    @property
    def waiting(self) -> str:
        return "".join(self.scheduler.queues.waiting)


def of_lengths(player: Player, names: str, lengths: Iterable[int], max_tokens: int = 8) -> Player:
    for name, tokens in zip(names, lengths, strict=True):
        player.add(name, tokens, max_tokens)
    return player


class TestWholePrompts:
    def test_prompts_fill_a_step_and_decodes_wait_for_them(self) -> None:
        player = of_lengths(Player(tokens=16), "abc", (8, 8, 8))
        assert player.steps(3) == ["a8 b8", "c8", "a1 b1 c1"]

    def test_nobody_overtakes_the_head_of_the_queue(self) -> None:
        player = of_lengths(Player(tokens=16), "abc", (10, 8, 2))
        assert player.steps(2) == ["a10", "b8 c2"]

    def test_seats(self) -> None:
        player = of_lengths(Player(seqs=2), "abc", (4, 4, 4), max_tokens=3)
        assert player.steps(4) == ["a4 b4", "a1 b1", "a1 b1", "c4"]

    def test_a_prompt_that_leaves_no_watermark_is_rejected_on_the_way(self) -> None:
        player = Player(tokens=2000, blocks=200)
        rejected = player.add("a", 793, 1)
        player.add("b", 792)
        assert player.step() == "b792 !a"
        assert rejected.end_reason is EndReason.TOO_LONG

    def test_a_prompt_longer_than_the_limit_is_rejected(self) -> None:
        for max_model_len, limit in ((10, 10), (20, 16)):
            player = Player(VLLMV0(max_model_len=max_model_len), tokens=16)
            rejected = player.add("a", limit + 1)
            player.add("b", limit)
            assert player.step() == f"b{limit} !a"
            assert rejected.end_reason is EndReason.TOO_LONG

    def test_later_keeps_those_behind_out(self) -> None:
        player = of_lengths(Player(blocks=10), "abc", (31, 12, 4), max_tokens=3)
        assert player.steps(4) == ["a31", "a1", "a1", "b12 c4"]

    def test_preemption_by_recompute(self) -> None:
        """Without a free block a request even preempts itself, though its last block has room."""
        player = of_lengths(Player(blocks=4), "ab", (7, 7))
        expected = ["a7 b7", "a1 -b", "b8", "a1 -b", "a1", "a1", "a1", "a1", "-a"]
        assert player.steps(9) == expected
        assert player.waiting == "ab"
        assert player.steps(3) == ["a14", "b9", "b1"]

    def test_preemption_by_swap(self) -> None:
        """No prompt starts while a request is swapped out."""
        player = of_lengths(Player(blocks=4, host_blocks=8, swap=True), "abc", (7, 7, 3))
        expected = ["a7 b7", "a1 >b", "a1", "a1", "a1", "a1", "a1", ">a"]
        assert player.steps(8) == expected
        assert list(player.scheduler.queues.swapped) == ["b", "a"]
        assert player.waiting == "c"
        assert player.steps(3) == ["b1 <b", "b1", "b1"]

    def test_a_decode_wants_a_free_block_even_with_room_in_its_last(self) -> None:
        player = of_lengths(Player(blocks=6), "abc", (5, 5, 5), max_tokens=4)
        assert player.steps(2) == ["a5 b5 c5", "a1 b1 -c"]

    def test_what_a_client_gives_up_is_forgotten(self) -> None:
        player = of_lengths(Player(blocks=2), "ab", (4, 4), max_tokens=4)
        assert player.steps(2) == ["a4 b4", "a1 -b"]
        player.scheduler.end("a", EndReason.CLIENT, 0.0)
        assert player.step() == "b5"

    def test_prompts_wait_for_a_share_of_the_last_prompt_steps_time(self) -> None:
        player = Player(VLLMV0(delay_factor=0.5))
        player.add("a", 4, arrival_s=0.0)
        assert player.step(0.0) == "a4"
        player.add("b", 4, arrival_s=1.0)
        assert [player.step(1.0 + waited_s) for waited_s in (0.0, 0.1, 0.4, 0.6)] == [
            *("a1", "a1", "a1"),
            "b4",
        ]

    def test_adapters_beyond_the_limit_are_passed_over_and_keep_their_place(self) -> None:
        player = Player(max_loras=1)
        for name, lora_id in zip("abcd", ("x", "y", "x", None), strict=True):
            player.add(name, 4, 3, lora_id=lora_id)
        assert player.step() == "a4 c4 d4"
        player.add("e", 4, 3, lora_id="y")
        assert player.waiting == "be"
        assert player.steps(3) == ["a1 c1 d1", "a1 c1 d1", "b4 e4"]

    def test_lookahead_slots_are_held_beyond_the_tokens(self) -> None:
        def second_and_third_step(num_lookahead_slots: int) -> list[str]:
            player = Player(VLLMV0(num_lookahead_slots=num_lookahead_slots), blocks=3)
            player.add("a", 4)
            assert player.step() == "a4"
            second = player.step()
            player.add("b", 4)
            return [second, player.step()]

        assert second_and_third_step(0) == ["a1", "b4"]
        assert second_and_third_step(4) == ["a1", "-a"]


class TestPriority:
    def test_the_head_of_the_unsorted_queue_drives_others_out_and_the_next_step_gains(self) -> None:
        player = Player(VLLMV0(policy=SchedulingPolicy.PRIORITY), seqs=1)
        for name, priority in (("a", 5), ("b", 1), ("c", 0)):
            player.add(name, 4, 4, priority=priority)
        assert player.steps(6) == ["a4", "-a", "c4", "c1", "c1", "c1"]
        assert player.steps(2) == ["b4", "b1"]

    def test_a_later_request_drives_out_a_running_one(self) -> None:
        player = Player(VLLMV0(policy=SchedulingPolicy.PRIORITY), seqs=1)
        player.add("a", 4, priority=5)
        assert player.steps(2) == ["a4", "a1"]
        player.add("b", 4, 2, priority=0)
        assert player.steps(4) == ["-a", "b4", "b1", "a6"]

    def test_for_want_of_blocks(self) -> None:
        player = Player(VLLMV0(policy=SchedulingPolicy.PRIORITY), blocks=5)
        player.add("a", 7, priority=5)
        player.add("b", 7, priority=4)
        assert player.steps(2) == ["a7 b7", "b1 a1"]
        player.add("c", 7, 3, priority=0)
        assert player.steps(3) == ["b1 -a", "c7", "c1 -b"]
        assert player.steps(3) == ["b10", "c1 -b", "b11"]

    def test_a_victim_of_priority_is_computed_anew_under_swap_too(self) -> None:
        """vLLM fails an assertion here."""
        priority = VLLMV0(policy=SchedulingPolicy.PRIORITY)
        player = Player(priority, seqs=1, host_blocks=8, swap=True)
        player.add("a", 4, priority=5)
        assert player.steps(2) == ["a4", "a1"]
        player.add("b", 4, 2, priority=0)
        assert player.steps(4) == ["-a", "b4", "b1", "a6"]


class TestChunks:
    @staticmethod
    def player(tokens: int = 64, seqs: int = 8, blocks: int = 100) -> Player:
        chunked = VLLMV0(enable_chunked_prefill=True)
        return Player(chunked, tokens=tokens, seqs=seqs, blocks=blocks)

    def test_what_is_left_of_a_step_begins_the_next_prompt(self) -> None:
        player = of_lengths(self.player(tokens=64), "ab", (60, 60))
        assert player.steps(3) == ["a60 b4*", "b56 a1", "a1 b1"]

    def test_decodes_first_and_prompts_with_the_rest(self) -> None:
        player = self.player(tokens=8)
        player.add("a", 5)
        assert player.step() == "a5"
        player.add("b", 20)
        assert player.steps(4) == ["b7* a1", "b7* a1", "b6 a1", "a1 b1"]

    def test_new_prompts_stand_before_those_begun(self) -> None:
        player = of_lengths(self.player(tokens=8), "ab", (20, 3))
        assert player.steps(4) == ["a8*", "a8*", "b3 a4", "a1 b1"]

    def test_a_younger_request_takes_the_blocks_of_a_victim(self) -> None:
        player = of_lengths(self.player(blocks=4), "abc", (7, 7, 3), max_tokens=8)
        assert player.steps(3) == ["a7 b7", "c3 a1 -b", "a1 -c"]
        assert player.waiting == "cb"

    def test_seats(self) -> None:
        player = of_lengths(self.player(seqs=2), "abc", (4, 4, 4))
        assert player.steps(2) == ["a4 b4", "a1 b1"]

    def test_a_prompts_blocks_are_booked_when_it_begins(self) -> None:
        player = of_lengths(self.player(tokens=8, blocks=6), "ab", (12, 13))
        assert player.steps(2) == ["a8*", "a4"]
        assert player.kv.num_free_blocks == 3, "b needs four"


class TestWhereItDiffers:
    """Cases in which vLLM drops a request that has emitted tokens, dies, or never ends."""

    def test_what_has_outgrown_the_longest_prompt_is_computed_in_parts(self) -> None:
        vllm = VLLMV0(max_model_len=8)
        player = of_lengths(Player(vllm, tokens=8, blocks=4), "a", (7,))
        assert player.steps(9) == ["a7", *["a1"] * 6, "-a", "a8*"]
        player.add("b", 2)
        assert player.steps(2) == ["a6", "b2"]

    def test_a_prompt_longer_than_a_step_is_computed_in_parts(self) -> None:
        player = of_lengths(Player(tokens=8), "abc", (4, 17, 4))
        assert player.steps(6) == ["a4", "b8*", "b8*", "b1", "c4", "a1 b1 c1"]

    def test_what_has_outgrown_the_watermark_goes_below_it(self) -> None:
        player = of_lengths(Player(VLLMV0(watermark=0.25), blocks=4), "a", (12,), max_tokens=3)
        assert player.steps(3) == ["a12", "a1", "-a"]
        assert player.step() == "a14"
        assert not player.scheduler.num_unfinished

    def test_without_host_memory_a_victim_is_computed_anew(self) -> None:
        player = of_lengths(Player(blocks=4, host_blocks=1, swap=True), "ab", (7, 7))
        assert player.steps(3) == ["a7 b7", "a1 -b", "b8"]

    def test_a_swapped_request_comes_back_below_the_watermark_if_it_must(self) -> None:
        player = Player(VLLMV0(watermark=0.25), blocks=4, host_blocks=4, swap=True)
        of_lengths(player, "a", (12,), max_tokens=3)
        assert player.steps(4) == ["a12", "a1", ">a", "a1 <a"]

    def test_a_swapped_prompt_longer_than_a_step_comes_back_in_parts(self) -> None:
        policy = VLLMV0(enable_chunked_prefill=True)
        player = Player(policy, tokens=8, blocks=8, host_blocks=8, swap=True)
        of_lengths(player, "ab", (7, 22), max_tokens=6)
        assert player.steps(6) == ["a7 b1*", "a1 >b", "a1", "a1", "a1", "a1"]
        assert player.steps(3) == ["b8* <b", "b8*", "b5"]

    def test_a_chunked_prompt_that_fills_the_cache_goes_on(self) -> None:
        policy = VLLMV0(enable_chunked_prefill=True)
        player = of_lengths(Player(policy, tokens=8, blocks=4), "a", (13,), max_tokens=3)
        assert player.steps(3) == ["a8*", "a5", "-a"]


class TestPrefixCaching:
    def test_what_is_cached_counts_against_the_step_but_is_not_computed(self) -> None:
        player = Player(tokens=16, caches_prefixes=True)
        player.add("a", 12, max_tokens=1, begins=1)
        assert player.step() == "a12"
        player.add("b", 12, begins=1)
        player.add("c", 8)
        assert player.steps(2) == ["b4", "c8"]

    def test_a_chunk_that_is_cached_as_a_whole_computes_its_place_alone(self) -> None:
        policy = VLLMV0(enable_chunked_prefill=True)
        player = Player(policy, tokens=8, caches_prefixes=True)
        player.add("a", 21, max_tokens=1, begins=1)
        assert player.steps(3) == ["a8*", "a8*", "a5"]
        player.add("b", 22, begins=1)
        assert player.steps(4) == ["b1*", "b1*", "b2", "b1"]

    def test_chunks_end_with_a_block(self) -> None:
        policy = VLLMV0(enable_chunked_prefill=True)
        player = Player(policy, tokens=16, caches_prefixes=True)
        of_lengths(player, "ab", (3, 30))
        assert player.steps(3) == ["a3 b12*", "b12* a1", "b6 a1"]

    def test_a_step_of_less_than_a_block_counts_blocks_one_by_one(self) -> None:
        policy = VLLMV0(enable_chunked_prefill=True)
        player = Player(policy, tokens=3, caches_prefixes=True)
        player.add("a", 8, begins=1)
        assert player.steps(4) == ["a3*", "a3*", "a2", "a1"]

    def test_blocks_that_are_booked_for_the_same_are_booked_once(self) -> None:
        """They are admitted together; but a prompt starts only where all of it would fit."""
        player = Player(blocks=7, caches_prefixes=True)
        for name in "abc":
            player.add(name, 9, max_tokens=2, begins=1)
        player.add("d", 9, max_tokens=2, begins=1)
        assert player.step() == "a9 b1 c1"
        assert player.kv.num_free_blocks == 2

    def test_two_blocks_that_become_equal_are_one_in_the_next_step(self) -> None:
        """vLLM gives d the room that a and b leave in the same step."""
        player = Player(blocks=5, block_size=2, caches_prefixes=True)
        for name, tokens in zip("abcd", (1, 1, 2, 2), strict=True):
            player.add(name, tokens, begins=1 if name in "ab" else 0)
        assert player.step() == "a1 b1 c2 d2"
        assert player.kv.num_free_blocks == 1
        assert player.step() == "a1 b1 c1"
        assert player.kv.num_free_blocks == 1
        assert player.kv.block_tables["a"] == player.kv.block_tables["b"]

    def test_who_comes_back_shares_again(self) -> None:
        player = Player(blocks=8, host_blocks=8, swap=True, caches_prefixes=True)
        player.add("a", 8, max_tokens=12, begins=1)
        player.add("c", 4, max_tokens=6)
        player.add("b", 12, max_tokens=9, begins=1)
        assert player.steps(3) == ["a8 c4 b4", "a1 c1 b1", "a1 c1 b1"]
        assert player.steps(4) == ["a1 c1 b1", "a1 c1 b1", "a1 c1 >b", "b1 a1 <b"]
        tables = player.kv.block_tables
        assert tables["a"][:2] == tables["b"][:2]
        assert player.kv.num_free_blocks == 1


def test_running_requests_of_another_policy_are_taken_over() -> None:
    chunked = VLLMV0(enable_chunked_prefill=True)
    player = of_lengths(Player(chunked, tokens=8), "ab", (5, 20))
    assert player.steps(2) == ["a5 b3*", "b7* a1"]
    player.scheduler.policy = VLLMV0()
    assert player.steps(3) == ["b8*", "b2", "a1 b1"]


def test_a_prompt_whose_blocks_another_policy_gave_away_takes_them_from_the_last() -> None:
    player = of_lengths(Player(Sarathi(), tokens=2, blocks=8), "ab", (5, 20), max_tokens=12)
    assert player.steps(11)[-1] == "a1 b1*"
    assert player.kv.num_free_blocks == 1, "b lacks two for the rest of its prompt"
    player.scheduler.policy = VLLMV0()
    assert player.steps(7) == ["b2* -a", "b2*", "b2*", "b2*", "b2*", "b1", "b1"]


@dataclass
class Planned(Policy):
    """Another policy, whose plans are given."""

    plans: list[SchedulerOutput]

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        return self.plans.pop(0)


def test_what_another_policy_began_anew_is_a_prompt_again() -> None:
    policy = VLLMV0()
    player = of_lengths(Player(policy), "ab", (5, 5))
    assert player.steps(3) == ["a5 b5", "a1 b1", "a1 b1"]
    player.scheduler.policy = Planned(
        [SchedulerOutput({"a": 1}, preempted=("b",)), SchedulerOutput({"a": 1, "b": 4})]
    )
    assert player.steps(2) == ["a1 -b", "a1 b4*"]
    player.scheduler.policy = policy
    assert player.steps(2) == ["b4", "a1 b1"]


def test_reset_forgets() -> None:
    policy = VLLMV0(enable_chunked_prefill=True)
    of_lengths(Player(policy), "ab", (8, 8)).steps(2)
    policy.reset()
    assert vars(policy).keys() == vars(VLLMV0()).keys()
    assert not policy._tables
    assert not policy._running


@pytest.mark.parametrize("option", ["delay_factor=-1", "watermark=-1", "max_model_len=-1"])
def test_options_are_checked(option: str) -> None:
    with pytest.raises(PolicySpecError, match="must not be negative, not -1"):
        make_policy(f"vllm_v0:{option}")


def test_options_on_the_command_line() -> None:
    policy = make_policy("vllm_v0:enable_chunked_prefill=true,policy=priority,watermark=0.02")
    chunked = VLLMV0(True, SchedulingPolicy.PRIORITY, watermark=0.02)
    assert policy == chunked


@pytest.mark.parametrize(
    "options",
    ["enable_chunked_prefill=true", "policy=priority,watermark=0.1,delay_factor=0.5"],
)
def test_it_obeys_the_laws(options: str) -> None:
    check_policy(
        lambda: make_policy(f"vllm_v0:{options}"),
        max_examples=15,
        conserves_work=options.startswith("enable_chunked_prefill"),
    )
