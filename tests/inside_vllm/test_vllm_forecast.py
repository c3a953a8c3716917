"""A plan predicts what a new request will find in the prefix cache, and the request finds it."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from real_vllm import Arrival, Loop, Step, Workload, make_config, make_scheduler

from slosched.integrations.vllm import SLOScheduler

BLOCK = 8
SHARED = tuple(range(100, 100 + 2 * BLOCK))


def prompt(last: int, shared: tuple[int, ...] = SHARED) -> tuple[int, ...]:
    return (*shared, *range(last, last + BLOCK // 2))


def workload(*prompts: tuple[int, ...], num_blocks: int = 32, calls: tuple[int, ...]) -> Workload:
    arrivals = tuple(
        Arrival(call, f"r{i}", tokens, max_tokens=2)
        for i, (tokens, call) in enumerate(zip(prompts, calls, strict=True))
    )
    return Workload(1, arrivals, num_blocks, BLOCK, 256, 8, 256, stop_chance=0.0)


def run(given: Workload) -> list[Step]:
    """Return every step, after checking that it ran as planned to the token."""
    config = make_config(given, caches_prefixes=True, settings={"policy": "fcfs"})
    scheduler = make_scheduler(SLOScheduler, config)
    steps = Loop(scheduler, given, is_async=False).run()
    assert not scheduler.truth.divergences
    assert not scheduler.truth.num_deeper_matches
    return steps


def test_what_the_step_computes_for_one_request_the_next_one_finds() -> None:
    first, *_ = run(workload(prompt(500), prompt(600), prompt(700), calls=(0, 0, 0)))
    assert dict(first.scheduled) == {"r0": 20, "r1": 4, "r2": 4}


def test_a_chunk_shares_no_more_than_it_computes() -> None:
    given = replace(workload(prompt(500), prompt(600), calls=(0, 0)), max_num_batched_tokens=12)
    first, second, *_ = run(given)
    assert dict(first.scheduled) == {"r0": 12}
    assert dict(second.scheduled) == {"r0": 8, "r1": 4}


@pytest.mark.parametrize(("num_taken", "num_found"), [(8, 2), (9, 1), (10, 0)])
def test_blocks_that_the_plan_takes_are_not_found_any_more(num_taken: int, num_found: int) -> None:
    # r0 and r1 leave two and six cached blocks. vLLM takes r0's first, from their end; eight more
    # are empty. r2 shares nothing with the others, and takes from both.
    other, stranger = range(1000, 1000 + 6 * BLOCK), range(2000, 2000 + num_taken * BLOCK)
    given = workload(
        *(prompt(500), tuple(other), tuple(stranger), prompt(600)),
        num_blocks=17,
        calls=(0, 0, 6, 6),
    )
    [together] = [step for step in run(given) if "r2" in dict(step.scheduled)][:1]
    assert dict(together.scheduled) == {"r2": num_taken * BLOCK, "r3": 20 - num_found * BLOCK}
