"""The ideas for goodput: each does something, and the page is made of their results."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import make_request
from hypothesis import given
from hypothesis import strategies as st

from experiments.arena.scenarios import NOISE, MadeUp, Scenario
from experiments.goodput import report, results
from experiments.goodput.ideas import BASE, IDEAS, Idea
from experiments.goodput.plans import most_within
from experiments.goodput.points import Point, shares
from slosched.core import Limits
from slosched.perfmodel import load_model
from slosched.policy.kit.punctual import Supply, Timed, by_deadline, most_in_time
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload.lengths import Lognormal

SOURCE = MadeUp(Lognormal(1500, 1.2), Lognormal(150, 0.8), cv=2.5)
SCENARIO = Scenario("small", "rtx4090/llama-3.2-3b", SOURCE, "mixed")
POINT = Point("busy", SCENARIO, 11, num_requests=100, first_window=0)
RARE = {
    *("give way to the last", "no end for a prompt", "reject when expired"),
    *("fairness 0.25", "fairness 0.5", "late decodes do not count", "the tightest binds"),
}
"""Ideas that do nothing within so few requests."""
WITH_SEATS = {"never give way", "give way later"}
"""Ideas about decodes that give way, which none does while seats are short."""


def token_times(idea: Idea, max_num_seqs: int = 12) -> list[tuple[float, ...]]:
    """Return when tokens come under a load too high for the device, its cache and its seats."""
    config = SimulationConfig(
        limits=Limits(max_num_seqs=max_num_seqs),
        num_blocks=2500 if max_num_seqs < 256 else 20_000,
        disturbances=Disturbances(NOISE, tail=0.03),
        seed=1,
    )
    requests = simulate(POINT.trace(0), idea.policy(), load_model(SCENARIO.model), config)
    return [tuple(r.token_times_s) for r in requests]


@pytest.fixture(scope="module")
def base() -> list[tuple[float, ...]]:
    return token_times(BASE)


OFTEN = [i for i in IDEAS if i is not BASE and i.name not in RARE | WITH_SEATS]


@pytest.mark.parametrize(
    "idea",
    [
        pytest.param(idea, id=idea.name, marks=pytest.mark.slow if i % 3 else ())
        for i, idea in enumerate(OFTEN)
    ],
)
def test_an_idea_does_something(idea: Idea, base: list[tuple[float, ...]]) -> None:
    assert token_times(idea) != base


def test_decodes_give_way_while_there_are_seats() -> None:
    base = token_times(BASE, max_num_seqs=256)
    for idea in IDEAS:
        if idea.name in WITH_SEATS:
            assert token_times(idea, max_num_seqs=256) != base, idea.name


def test_not_even_if_the_tightest_binds_do_others_pay_for_a_tpot_that_no_step_keeps() -> None:
    """A fifth asks for one; these requests are rejected, so that no decode has such a TPOT."""
    poisoned = replace(POINT, requests_per_s=4, unkeepable=0.2)
    tightest = next(idea for idea in IDEAS if idea.name == "the tightest binds")
    kept, tight = (poisoned.play(idea.policy(), 0)["attainment"] for idea in (BASE, tightest))
    assert 0.75 < kept == tight


def test_what_is_counted() -> None:
    requests = [make_request(f"r{i}", 100 * (i + 1)) for i in range(10)]
    found = shares(requests, [True] * 9 + [False])
    assert found == {
        "attainment": 0.9,
        "good_prompt_tokens": pytest.approx(45 / 55),
        "longest_tenth": 0.0,
    }


def test_a_point_plays_what_it_says() -> None:
    calm, slow = POINT.play(BASE.policy(), 0), replace(POINT, tail=0.2).play(BASE.policy(), 0)
    assert 0 < slow["attainment"] < calm["attainment"] <= 1
    assert POINT.trace(0).rate == pytest.approx(11)
    assert POINT.trace(0).requests != POINT.trace(1).requests


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 100)), max_size=8))
def test_with_even_room_the_plan_is_moore_and_hodgsons(jobs: list[tuple[int, int]]) -> None:
    timed: list[Timed] = []
    for i, (alone_s, due_s) in enumerate(jobs):
        request = make_request(f"r{i}", 10)
        request.deadline_s = float(due_s)
        timed.append((request, float(alone_s)))
    ordered = by_deadline(timed)
    room_s = [0.5 * r.deadline_s for r, _ in ordered]
    assert most_within(ordered, room_s) == most_in_time(ordered, Supply(0.0, 0.5))


def test_the_page_is_made_of_the_results() -> None:
    assert report.PAGE.read_text(encoding="utf-8") == report.text()
    ran = set(results.read(results.RESULTS)["idea"])
    assert ran == {idea.name for idea in IDEAS}
