"""Scheduling never changes greedy output: in float32 every token equals `generate`'s.

This holds for every policy, and no matter how prompts are cut into chunks, which requests are
preempted, recomputed or swapped, what a prefix cache finds on the device or on the host, and which
draft tokens are verified.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import pytest
from greedy import generated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import ADMITTING_ONLY_WHAT_FITS, BLOCK_SIZE, Ask, Replica, serve, was_refused

from slosched.core import EndReason, Limits, PreemptionMode, SamplingParams
from slosched.kv import HostWrites, PrefixCaching, PrefixHost
from slosched.policy import POLICIES
from slosched.testing import prefix_hosts

if TYPE_CHECKING:
    from slosched.engine.torch import LoadedModel

REAL_MAX_TOKENS = 10
REAL_TEXTS = (
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "The three most important facts about the history of paper are: 1.",
    "Water boils at 100 degrees Celsius, but on the top of a high mountain, where",
    "Dear Sir or Madam,\n\nI am writing to",
)


@pytest.fixture(scope="module")
def real_prompts(smollm2: LoadedModel) -> list[list[int]]:
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    return [tokenizer(text).input_ids for text in REAL_TEXTS]


@pytest.fixture(scope="module")
def real_outputs(smollm2: LoadedModel, real_prompts: list[list[int]]) -> list[list[int]]:
    return [generated(smollm2, prompt, REAL_MAX_TOKENS) for prompt in real_prompts]


OFTEN_USED = ("fcfs", "sarathi", "edf", "sjf", "slo_aware", "goodput")
CHUNKED_TRTLLM = (
    "trtllm:capacity_scheduler_policy=max_utilization"
    ",context_chunking_policy=first_come_first_served"
)
"""TensorRT-LLM with chunks: by default it rejects prompts longer than a step and never preempts."""
RECOMPUTE, SWAP = PreemptionMode
REPLICAS = [("fcfs", 7, SWAP, True), ("goodput", 7, RECOMPUTE, False)]
"""Each preemption mode and loop; the tiny model plays all policies in all of them."""
OTHERS = [name for name in POLICIES if name not in (*OFTEN_USED, "trtllm")]
RARER = [
    each for each in product(OFTEN_USED, (7,), PreemptionMode, [False]) if each not in REPLICAS
]
RARER += [("sjf", 7, RECOMPUTE, True), ("goodput", 7, RECOMPUTE, True)]
RARER += [*product(OFTEN_USED, (512,), PreemptionMode, [False])]
RARER += [(spec, 7, PreemptionMode.SWAP, False) for spec in (*OTHERS, CHUNKED_TRTLLM)]
"""The rest of the product, whole prompts in a step, and policies that are used less often, which
`make test-slow` runs."""


@pytest.mark.model
@pytest.mark.parametrize(
    ("policy", "max_num_batched_tokens", "mode", "overlap"),
    [*REPLICAS, *(pytest.param(*replica, marks=pytest.mark.slow) for replica in RARER)],
)
def test_real_model(
    smollm2: LoadedModel,
    real_prompts: list[list[int]],
    real_outputs: list[list[int]],
    policy: str,
    max_num_batched_tokens: int,
    mode: PreemptionMode,
    overlap: bool,
) -> None:
    replica = Replica(
        policy=policy,
        limits=Limits(max_num_batched_tokens=max_num_batched_tokens, preemption_mode=mode),
        # The prompts of three requests fit, but not their outputs, so one has to be preempted.
        num_blocks=13,
        overlap=overlap,
    )
    asks = [
        Ask(prompt, REAL_MAX_TOKENS, arrival_step=step)
        for prompt, step in zip(real_prompts, (0, 0, 0, 3, 6), strict=True)
    ]
    requests = serve(smollm2, replica, asks).requests
    for request, output in zip(requests, real_outputs, strict=True):
        assert request.output_token_ids == ([] if was_refused(request, policy) else output)
    if policy in ADMITTING_ONLY_WHAT_FITS:
        assert requests[0].output_token_ids, "nobody was served"
        return
    assert sum(request.num_preemptions for request in requests) > 0, "nobody was preempted"
    swaps = sum(request.num_swaps for request in requests)
    assert (swaps > 0) == (mode is PreemptionMode.SWAP)


TINY_MAX_TOKENS = 12


@cache
def tiny() -> LoadedModel:
    import torch

    from slosched.engine.torch import load_model

    torch.set_num_threads(1)
    return load_model("tiny-random", device="cpu", dtype="float32")


@cache
def tiny_prompt(num_tokens: int, *, alike: bool = False) -> tuple[int, ...]:
    """Return the prompt of this length; those that are `alike` share a prefix."""
    first = 0 if alike else 7 * num_tokens
    return tuple((first + 13 * i * i) % 259 for i in range(num_tokens))


@cache
def tiny_output(prompt: tuple[int, ...]) -> list[int]:
    return generated(tiny(), prompt, TINY_MAX_TOKENS)


@st.composite
def patterns(draw: st.DrawFn) -> tuple[Replica, list[Ask]]:
    """Draw prompts, and a replica whose KV cache holds about one and a half requests."""
    lengths = draw(st.lists(st.sampled_from([1, 2, 5, 11, 17, 30]), min_size=1, max_size=6))
    prompts = [tiny_prompt(length, alike=draw(st.booleans())) for length in lengths]
    longest = -(-(max(lengths) + TINY_MAX_TOKENS) // BLOCK_SIZE)
    prefix_cache = draw(st.sampled_from(PrefixCaching))
    steps = draw(st.lists(st.integers(0, 6), min_size=len(lengths), max_size=len(lengths)))
    replica = Replica(
        policy=draw(st.sampled_from(sorted((*OFTEN_USED, *OTHERS, CHUNKED_TRTLLM)))),
        limits=Limits(
            max_num_batched_tokens=draw(st.sampled_from([1, 3, 8, 20, 256])),
            max_num_seqs=draw(st.integers(1, 6)),
            preemption_mode=draw(st.sampled_from(PreemptionMode)),
        ),
        num_blocks=draw(st.integers(longest, 2 * longest)),
        num_host_blocks=draw(st.sampled_from([0, longest, 8 * longest])),
        overlap=draw(st.booleans()),
        prefix_cache=prefix_cache,
        prefix_host=draw(prefix_hosts(longest, prefix_cache)),
        num_draft_tokens=draw(st.sampled_from([0, 0, 1, 3])),
    )
    asks = [
        Ask(prompt, TINY_MAX_TOKENS, arrival_step=step)
        for prompt, step in zip(prompts, sorted(steps), strict=True)
    ]
    return replica, asks


@pytest.mark.parametrize("num_patterns", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_tiny_model_on_random_patterns(num_patterns: int) -> None:
    @settings(
        max_examples=num_patterns,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(patterns())
    def tokens_are_those_of_generate(pattern: tuple[Replica, list[Ask]]) -> None:
        replica, asks = pattern
        requests = serve(tiny(), replica, asks).requests
        for request, ask in zip(requests, asks, strict=True):
            refused = was_refused(request, replica.policy)
            assert request.output_token_ids == ([] if refused else tiny_output(tuple(ask.prompt)))

    tokens_are_those_of_generate()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_turn_of_a_conversation_finds_prompt_and_answer_in_the_cache(
    overlap: bool,
) -> None:
    first = tiny_prompt(30)
    second = (*first, *tiny_output(first), 5, 6, 7)
    replica = Replica(overlap=overlap, prefix_cache=PrefixCaching.HASH)
    later = Ask(second, TINY_MAX_TOKENS, arrival_step=2 * TINY_MAX_TOKENS)
    run = serve(tiny(), replica, [Ask(first, TINY_MAX_TOKENS), later])
    assert run.outputs == [tiny_output(first), tiny_output(second)]
    # All but the first's last token were computed, 41 of which 40 are in full blocks of 4.
    assert [r.num_cached_tokens for r in run.requests] == [0, 40]


@pytest.mark.parametrize(
    ("caching", "writes", "overlap"),
    [
        (PrefixCaching.RADIX, HostWrites.BACK, False),
        (PrefixCaching.RADIX, HostWrites.THROUGH, True),
        (PrefixCaching.HASH, HostWrites.BACK, True),
    ],
)
def test_what_the_device_has_evicted_comes_back_from_the_host(
    caching: PrefixCaching, writes: HostWrites, overlap: bool
) -> None:
    """Two conversations take turns in a cache that holds one of them."""
    turns: list[tuple[int, ...]] = [tiny_prompt(30), tiny_prompt(29)]
    for _ in range(2):
        said = turns[-2]
        turns.append((*said, *tiny_output(said), 5, 6, 7))
    asks = [Ask(turn, TINY_MAX_TOKENS, arrival_step=20 * i) for i, turn in enumerate(turns)]
    replica = Replica(num_blocks=15, num_host_blocks=5, overlap=overlap, prefix_cache=caching)
    alone = serve(tiny(), replica, asks).requests
    replica = replace(replica, prefix_host=PrefixHost(80, writes))
    run = serve(tiny(), replica, asks)
    assert run.outputs == [tiny_output(prompt) for prompt in turns]
    # All full blocks of the turn before, of which the last token was not computed.
    known = [0, 0, *((len(said) + TINY_MAX_TOKENS - 1) // 4 * 4 for said in turns[:-2])]
    assert [r.num_cached_tokens for r in run.requests] == known
    assert sum(r.num_cached_tokens for r in alone) < sum(known) / 2


@pytest.mark.parametrize("policy", ["fcfs", "vllm_v1"])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_of_one_step_share_what_the_first_of_them_computes(
    policy: str, overlap: bool
) -> None:
    """Every layer writes all keys of a step before it reads any."""
    prompts = [tiny_prompt(30), (*tiny_prompt(30)[:20], 5, 6), tiny_prompt(30)]
    replica = Replica(policy, overlap=overlap, prefix_cache=PrefixCaching.HASH)
    run = serve(tiny(), replica, [Ask(prompt, TINY_MAX_TOKENS) for prompt in prompts])
    assert run.outputs == list(map(tiny_output, prompts))
    assert [r.num_cached_tokens for r in run.requests] == [0, 20, 28]


def test_a_stop_token_ends_a_request_while_the_next_step_computes_on() -> None:
    output = tiny_output(tiny_prompt(11))
    stop = next(i for i, token in enumerate(output) if i >= 3 and token not in output[:i])
    sampling = SamplingParams(ignore_eos=True, stop_token_ids=(output[stop],))
    asks = [Ask(tiny_prompt(n), TINY_MAX_TOKENS, sampling) for n in (11, 30)]
    requests = serve(tiny(), Replica(overlap=True), asks).requests
    assert requests[0].output_token_ids == output[: stop + 1]
    assert requests[0].end_reason is EndReason.STOP
    other = tiny_output(tiny_prompt(30))
    end = other.index(output[stop]) + 1 if output[stop] in other else len(other)
    assert requests[1].output_token_ids == other[:end]
