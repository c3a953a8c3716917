"""Draft tokens: how they are found, planned, accepted and given up, and when they pay."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from factories import make_model, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from slosched.cli.trace_source import make_up
from slosched.core import BatchShape, DraftOffer, EndReason, Limits, Request, StepResult
from slosched.evaluate.bounds import why_no_bound_holds
from slosched.kv import HashIndex, KVCache
from slosched.policy import FCFS, POLICIES
from slosched.policy.kit.drafts import drafts_that_pay
from slosched.policy.spec import make_policy
from slosched.scheduler import PromptLookup, Scheduler, Speculation
from slosched.scheduler.acceptance import Acceptance
from slosched.simulator.drafts import AcceptedDrafts, SimulatedDrafts
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.testing import Scenario, play, scenarios


def known(prompt: list[int], outputs: list[int]) -> Request:
    request = make_request(num_prompt_tokens=len(prompt))
    request.prompt_token_ids = prompt
    request.output_token_ids += outputs
    request.num_output_tokens = len(outputs)
    return request


@pytest.mark.parametrize(
    ("prompt", "outputs", "expected"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], [3], [4, 5, 9]),
        # The longest match counts, although a shorter one comes first.
        ([2, 3, 7, 8, 1, 2, 3, 4, 5, 6], [1, 2, 3], [4, 5, 6]),
        # Of two as long, the first.
        ([1, 2, 7, 0, 1, 2, 8, 5], [1, 2], [7, 0, 1]),
        # A match may overlap the end of the text, and fewer tokens may follow it.
        ([5, 5, 5], [5], [5]),
        ([1, 2, 3], [4], []),
        ([1], [1], []),
    ],
)
def test_prompt_lookup(prompt: list[int], outputs: list[int], expected: list[int]) -> None:
    assert list(PromptLookup(2, 3).propose(known(prompt, outputs), 3)) == expected


@given(st.lists(st.integers(0, 2), min_size=2, max_size=40), st.integers(1, 5))
def test_prompt_lookup_finds_what_a_search_by_hand_finds(tokens: list[int], most: int) -> None:
    expected: list[int] = []
    for length in range(4, 1, -1):
        starts = [
            i for i in range(len(tokens) - length) if tokens[i : i + length] == tokens[-length:]
        ]
        if starts:
            expected = tokens[starts[0] + length :][:most]
            break
    lookup = PromptLookup(2, 4)
    request = known(tokens[:1], [])
    lookup.propose(request, most)  # the text grows from step to step
    request.output_token_ids += tokens[1:]
    assert list(lookup.propose(request, most)) == expected


@pytest.mark.parametrize(("low", "high"), [(0, 3), (4, 3)])
def test_a_lookup_refuses_sizes_that_mean_nothing(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="1 <= min <= max"):
        PromptLookup(low, high)


def drafting(num_drafts: int, *, num_blocks: int = 64, limits: Limits | None = None) -> Scheduler:
    speculation = Speculation(PromptLookup(1, 2), num_drafts)
    return Scheduler(FCFS(), KVCache(num_blocks, 4), limits, make_model(), speculation)


def begun(scheduler: Scheduler, prompt: list[int], max_tokens: int = 16) -> Request:
    """Add a request and let it emit its first token, 1."""
    request = make_request(num_prompt_tokens=len(prompt), max_tokens=max_tokens)
    request.prompt_token_ids = prompt
    scheduler.add_request(request)
    batch = scheduler.schedule(0.0)
    scheduler.update(batch, StepResult({"r0": 1}), 1.0)
    return request


def test_accepted_drafts_are_emitted_and_the_blocks_of_the_others_are_free_again() -> None:
    scheduler = drafting(4)
    request = begun(scheduler, [1, 2, 3, 4, 5, 6, 7])
    batch = scheduler.schedule(1.0)
    assert batch.drafts == {"r0": [2, 3, 4, 5]}
    assert batch.output.num_scheduled_tokens == {"r0": 5}
    assert batch.shape.num_tokens == 5
    assert (batch.shape.num_decodes, batch.shape.num_draft_tokens) == (1, 4)
    assert scheduler.kv.num_held_blocks("r0") == 3
    assert request.num_computed_tokens == 8
    scheduler.update(batch, StepResult({"r0": 9}, num_accepted={"r0": 0}), 2.0)
    assert request.output_token_ids == [1, 9]
    assert (request.num_computed_tokens, scheduler.kv.num_held_blocks("r0")) == (8, 2)
    request.output_token_ids[-1] = 1
    batch = scheduler.schedule(2.0)
    scheduler.update(batch, StepResult({"r0": 9}, num_accepted={"r0": 3}), 3.0)
    assert request.output_token_ids == [1, 1, *batch.drafts["r0"][:3], 9]
    assert request.token_times_s == [1.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    assert (request.num_computed_tokens, request.num_output_tokens) == (12, 6)
    assert scheduler.kv.num_held_blocks("r0") == 3
    assert request.is_decode


def test_no_more_is_drafted_than_the_request_may_emit() -> None:
    scheduler = drafting(4)
    begun(scheduler, [1, 2, 3, 4, 5, 6, 7], max_tokens=4)
    assert scheduler.schedule(1.0).drafts == {"r0": [2, 3]}


def test_drafts_take_only_tokens_and_blocks_that_the_plan_leaves() -> None:
    scheduler = drafting(8, limits=Limits(max_num_batched_tokens=7))
    begun(scheduler, [1, 2, 3, 4, 5, 6, 7])
    assert scheduler.schedule(1.0).drafts == {"r0": [2, 3, 4, 5, 6, 7]}
    scheduler = drafting(8, num_blocks=6)
    begun(scheduler, [1, 2, 3, 4, 5, 6, 7], max_tokens=12)
    scheduler.kv.lend(3)  # one block is left, after that of the decode's own token
    assert scheduler.schedule(1.0).drafts == {"r0": [2, 3, 4, 5]}


def test_blocks_for_drafts_are_not_those_that_another_request_of_the_step_has_found() -> None:
    """The plan that found them knows of no drafts, for which the oldest blocks were evicted."""
    kv = KVCache(6, 4, prefix_index=HashIndex())
    scheduler = Scheduler(FCFS(), kv, None, make_model(), Speculation(PromptLookup(1, 2), 4))
    begun(scheduler, [*range(10, 18)], max_tokens=1)
    begun(scheduler, [*range(20, 28)], max_tokens=1)
    begun(scheduler, [1, 2, 3, 4, 5, 6, 7])
    again = make_request("again", num_prompt_tokens=10, max_tokens=2)
    again.prompt_token_ids = [*range(10, 20)]
    scheduler.add_request(again)
    batch = scheduler.schedule(1.0)
    assert batch.drafts == {"r0": [2, 3, 4, 5]}
    assert batch.output.num_found_tokens == {"again": 8}
    assert [len(chunk.block_table) for chunk in batch.chunks] == [3, 3]
    assert kv.num_free_blocks == 0
    kv.check()


def test_a_client_that_leaves_while_its_drafts_are_verified_gives_back_all_blocks() -> None:
    scheduler = drafting(4)
    request = begun(scheduler, [1, 2, 3, 4, 5, 6, 7])
    batch = scheduler.schedule(1.0)
    scheduler.end("r0", EndReason.CLIENT, 1.5)
    scheduler.update(batch, StepResult({"r0": 6}, num_accepted={"r0": 4}), 2.0)
    assert request.output_token_ids == [1]
    assert scheduler.kv.num_free_blocks == scheduler.kv.num_blocks


@settings(max_examples=6)
@given(scenarios(), st.sampled_from([0.0, 0.6, 1.0]), st.integers(1, 5))
@pytest.mark.parametrize("name", POLICIES)
def test_every_request_ends_once_and_no_block_leaks(
    name: str, scenario: Scenario, acceptance: float, num_tokens: int
) -> None:
    play(make_policy(name), replace(scenario, drafts=SimulatedDrafts(num_tokens, acceptance)))


def test_acceptance_is_learnt_by_request_and_from_all() -> None:
    acceptance = Acceptance()
    assert acceptance.of(["new"]) == [0.5]
    for _ in range(50):
        acceptance.begin_step()
        acceptance.note("good", 4, 4)
        acceptance.note("bad", 4, 0)
    good, bad, new = acceptance.of(["good", "bad", "new"])
    assert good > 0.9
    assert bad < 0.3
    # 4 of 5 verified tokens were accepted: of a request whose first draft is wrong, one counts.
    assert new == pytest.approx(0.8, abs=0.03)
    for _ in range(1000):
        acceptance.begin_step()
    assert acceptance.of(["bad"]) == [pytest.approx(0.5, abs=0.01)]


def decodes(count: int, context: int = 1000) -> BatchShape:
    shape = BatchShape()
    shape.add_decodes([context] * count)
    return shape


def offers(count: int, acceptance: float, most: int = 4) -> list[DraftOffer]:
    return [DraftOffer(make_request(f"r{i}"), most, acceptance) for i in range(count)]


def test_drafts_pay_in_small_batches_and_not_in_large_ones() -> None:
    model = make_model(per_token_s=1e-4, per_tile_s=0.0)
    chosen = {
        n: drafts_that_pay(offers(n, 0.7), decodes(n, 10), model.predict) for n in (1, 8, 512)
    }
    assert chosen[1] == [4]
    assert 0 < sum(chosen[8]) <= 32
    assert sum(chosen[512]) == 0


def test_the_best_drafts_are_taken_first_and_no_step_is_longer_than_its_limit() -> None:
    model = make_model(per_tile_s=0.0)
    mixed = [*offers(1, 0.2), *offers(1, 0.9)]
    low, high = drafts_that_pay(mixed, decodes(2), model.predict)
    assert low <= high == 4
    plain_s = model.predict(decodes(2))
    assert drafts_that_pay(mixed, decodes(2), model.predict, plain_s) == [0, 0]


def test_beside_a_long_chunk_a_draft_saves_little() -> None:
    model = make_model(per_token_s=2e-5, per_tile_s=0.0)
    shape = decodes(4)
    assert sum(drafts_that_pay(offers(4, 0.5), shape, model.predict)) > 0
    shape.add(2000, 0)
    assert sum(drafts_that_pay(offers(4, 0.5), shape, model.predict)) == 0


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
def test_the_simulated_acceptance_is_the_one_asked_for(acceptance: float) -> None:
    draws = AcceptedDrafts(acceptance, seed=3)
    first = [draws.num_first(f"r{i}", i % 7, 1) for i in range(4000)]
    assert sum(first) / len(first) == pytest.approx(acceptance, abs=0.03)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "goodput", "goodput+door"])
def test_speculation_makes_a_quiet_replica_faster(policy: str, overlap: bool) -> None:
    trace = make_up("azure_conv", 12, None, 0.5, None, 0)
    plain = SimulationConfig(overlap=overlap)
    drafts = replace(plain, drafts=SimulatedDrafts(4, 0.8))
    ends = [
        [r.end_s - r.arrival_s for r in simulate(trace, make_policy(policy), make_model(), config)]
        for config in (plain, drafts, drafts)
    ]
    assert ends[1] == ends[2], "the same seed gives another result"
    assert sum(ends[1]) < 0.6 * sum(ends[0])


@pytest.mark.parametrize("policy", ["fcfs", "goodput"])
def test_a_request_starts_before_its_first_token_in_a_step_that_nothing_is_planned_behind(
    policy: str,
) -> None:
    """A step with drafts is not foreseen, though it may have been planned ahead itself."""
    trace = make_up("azure_conv", 200, None, 30.0, None, 0)
    config = SimulationConfig(overlap=True, drafts=SimulatedDrafts(4, 0.6))
    for request in simulate(trace, make_policy(policy), make_model(), config):
        assert request.started_s is not None
        assert request.arrival_s <= request.started_s < request.token_times_s[0]


def test_no_bound_is_claimed_for_replicas_that_speculate() -> None:
    trace = make_up("azure_conv", 3, None, 1.0, None, 0)
    config = SimulationConfig(drafts=SimulatedDrafts(2, 0.5))
    assert "draft" in (why_no_bound_holds(trace, config) or "")


def test_lookups_in_long_texts_are_quick() -> None:
    """A request of 100,000 tokens is asked 200 times: a scan in Python would take a minute."""
    draw = random.Random(1)
    request = known([draw.randrange(50_000) for _ in range(100_000)], [])
    lookup = PromptLookup()
    for token in range(200):
        request.output_token_ids.append(token)
        lookup.propose(request, 4)
