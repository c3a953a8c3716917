"""Features do not disturb each other: with any of them at once, greedy tokens are `generate`'s.

Each case serves one mixed load on the tiny model in float32.  The features are draft tokens, LoRA
adapters, several answers to one prompt, grammars, preemption by swap or recompute, prefix caches
and the overlapped loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from mixed_load import LORAS, PROMPTS, Kind, World, end_of
from served import Ask, Replica, serve

from slosched.core import Limits, PreemptionMode
from slosched.kv import PrefixCaching

if TYPE_CHECKING:
    from slosched.engine.torch import LoadedModel


class Features(NamedTuple):
    """What is used in a case."""

    policy: str
    num_draft_tokens: int
    has_adapters: bool
    has_groups: bool
    has_grammars: bool
    mode: PreemptionMode
    prefix_cache: PrefixCaching
    overlap: bool


LEVELS: Sequence[Sequence[Any]] = (
    ("fcfs", "goodput", "vllm_v1"),
    (0, 4),
    (False, True),
    (False, True),
    (False, True),
    tuple(PreemptionMode),
    tuple(PrefixCaching),
    (False, True),
)
PRODUCT = [Features(*levels) for levels in product(*LEVELS)]


def pairwise(cases: Sequence[Features]) -> Iterator[Features]:
    """Yield few of all cases, such that each pair of levels of two features occurs in one."""
    missing = {pair for case in cases for pair in pairs_of(case)}
    while missing:
        best = max(cases, key=lambda case: len(missing & pairs_of(case)))
        missing -= pairs_of(best)
        yield best


@cache
def pairs_of(case: Features) -> frozenset[tuple[tuple[int, object], ...]]:
    return frozenset(combinations(enumerate(case), 2))


CASES = [*pairwise(PRODUCT)]
REST = [case for case in PRODUCT if case not in CASES]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    from slosched.engine.torch import load_model

    return load_model("tiny-random", device="cpu", dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def world(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(model, tmp_path_factory.mktemp("adapters"))


Wanted = tuple[str, str | None, Kind]
"""A prompt, its adapter, and how its answer is drawn."""


def wanted_in(case: Features) -> list[Wanted]:
    """Return the prompts of a case, each with every adapter that it has."""
    loras = LORAS if case.has_adapters else (None,)
    kinds = [Kind.FREE, Kind.GRAMMAR if case.has_grammars else Kind.FREE, Kind.FEW]
    return [
        (text, lora, kinds[(i + j) % 3])
        for j, lora in enumerate(loras)
        for i, text in enumerate(PROMPTS)
    ]


def asks_for(wanted: Sequence[Wanted], world: World, case: Features) -> list[Ask]:
    """Return what is asked for in a case, a prompt in each step."""
    return [
        world.ask(*each, n=3 if case.has_groups and i % 2 else 1, arrival_step=i)
        for i, each in enumerate(wanted)
    ]


def replica_of(case: Features) -> Replica:
    """Return a replica so small that requests are preempted."""
    return Replica(
        case.policy,
        Limits(max_num_batched_tokens=24, max_loras=2, preemption_mode=case.mode),
        num_blocks=20,
        num_host_blocks=200,
        overlap=case.overlap,
        prefix_cache=case.prefix_cache,
        num_draft_tokens=case.num_draft_tokens,
    )


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in REST)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_greedy_tokens_are_those_of_generate(world: World, case: Features) -> None:
    wanted = wanted_in(case)
    run = serve(world.model, replica_of(case), asks_for(wanted, world, case))
    for answer, each in zip(run.answers, wanted, strict=True):
        for request in answer:
            assert request.output_token_ids == world.expected(*each), request.request_id
            assert request.end_reason is end_of(each[2])
    requests = run.requests
    assert sum(request.num_preemptions for request in requests) > 0, "nobody was preempted"
    if case.num_draft_tokens:
        assert run.num_accepted_drafts > 0, "no draft was accepted"
    if case.prefix_cache is not PrefixCaching.OFF or case.has_groups:
        assert any(request.num_cached_tokens for request in requests), "nothing was shared"


def test_the_chosen_cases_hold_every_pair(world: World) -> None:
    for (i, some), (j, others) in combinations(enumerate(LEVELS), 2):
        assert {(case[i], case[j]) for case in CASES} == set(product(some, others))
    assert len(CASES) < len(PRODUCT) / 20
    outputs = {tuple(world.expected(PROMPTS[0], lora, Kind.FREE)) for lora in LORAS}
    assert len(outputs) == 3, "adapters change nothing"
