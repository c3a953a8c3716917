"""Scheduling never changes greedy output: in float32 every token equals `generate`'s.

This holds for every policy, and no matter how prompts are cut into chunks, which requests are
preempted, recomputed or swapped, what a prefix cache finds on the device or on the host, and which
draft tokens are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import pytest
from factories import make_model
from greedy import generated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slosched.core import (
    SLO,
    EndReason,
    Limits,
    PreemptionMode,
    Request,
    RequestStatus,
    SamplingParams,
)
from slosched.engine.background import InBackground
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.overlap import OverlappedEngine
from slosched.kv import NO_PREFIX_HOST, HostWrites, KVCache, PrefixCaching, PrefixHost
from slosched.policy import POLICIES
from slosched.policy.spec import make_policy
from slosched.scheduler import PromptLookup, Scheduler, Speculation
from slosched.testing import prefix_hosts

if TYPE_CHECKING:
    from slosched.engine.torch import LoadedModel

BLOCK_SIZE = 4
PATIENT = SLO(ttft_s=3600.0, tpot_s=3600.0)
"""An SLO that this machine meets, so that no request is rejected."""


@dataclass(frozen=True)
class Replica:
    """All settings that decide which tokens are computed in which step."""

    policy: str
    limits: Limits
    num_blocks: int
    num_host_blocks: int
    arrival_steps: tuple[int, ...]
    """The index of the step before which each request arrives."""
    overlap: bool = False
    prefix_cache: PrefixCaching = PrefixCaching.OFF
    prefix_host: PrefixHost = NO_PREFIX_HOST
    num_draft_tokens: int = 0
    """Most draft tokens of prompt lookup in a step; 0 for no speculative decoding."""


def serve(
    model: LoadedModel,
    replica: Replica,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stop_token_ids: tuple[int, ...] = (),
) -> list[Request]:
    """Serve all prompts to their end on the real engine."""
    from slosched.engine.torch import TorchExecutor

    executor = TorchExecutor(
        model,
        num_blocks=replica.num_blocks,
        block_size=BLOCK_SIZE,
        num_host_blocks=replica.num_host_blocks + replica.prefix_host.num_blocks,
    )
    index = replica.prefix_cache.new_index()
    kv = KVCache(
        *(replica.num_blocks, BLOCK_SIZE, replica.num_host_blocks, index, replica.prefix_host)
    )
    num_drafts = replica.num_draft_tokens
    speculation = Speculation(PromptLookup(1, 3), num_drafts) if num_drafts else None
    policy = make_policy(replica.policy)
    scheduler = Scheduler(policy, kv, replica.limits, make_model(), speculation)
    clock = MonotonicClock()
    engine = Engine(scheduler, executor, clock)
    if replica.overlap:
        engine = OverlappedEngine(scheduler, InBackground(executor), clock)
    requests: list[Request] = []
    step = 0
    while len(requests) < len(prompts) or engine.has_work:
        while len(requests) < len(prompts) and replica.arrival_steps[len(requests)] <= step:
            prompt = prompts[len(requests)]
            request = Request(
                request_id=f"r{len(requests)}",
                arrival_s=clock.now_s(),
                num_prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                slo=PATIENT,
                prompt_token_ids=prompt,
                sampling=SamplingParams(ignore_eos=True, stop_token_ids=stop_token_ids),
            )
            scheduler.add_request(request)
            requests.append(request)
        if engine.has_work:
            engine.step()
            kv.check()
        step += 1
    assert kv.num_free_blocks == kv.num_blocks, "an ended request holds KV blocks"
    return requests


ADMITTING_ONLY_WHAT_FITS = {"slosserve"}
"""Policies that reject requests whose remaining tokens may not all fit into the KV cache."""


def was_refused(request: Request, policy: str) -> bool:
    return request.status is RequestStatus.REJECTED and policy in ADMITTING_ONLY_WHAT_FITS


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
REPLICAS = [*product(OFTEN_USED, (7,), PreemptionMode, [False])]
OTHERS = [name for name in POLICIES if name not in (*OFTEN_USED, "trtllm")]
REPLICAS += [("fcfs", 7, PreemptionMode.SWAP, True), ("goodput", 7, PreemptionMode.RECOMPUTE, True)]
RARER = [*product(OFTEN_USED, (512,), PreemptionMode, [False])]
RARER += [(spec, 7, PreemptionMode.SWAP, False) for spec in (*OTHERS, CHUNKED_TRTLLM)]
"""Whole prompts in a step, and policies that are used less often, which `make test-slow` runs."""


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
        num_host_blocks=64,
        arrival_steps=(0, 0, 0, 3, 6),
        overlap=overlap,
    )
    requests = serve(smollm2, replica, real_prompts, REAL_MAX_TOKENS)
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
def patterns(draw: st.DrawFn) -> tuple[Replica, list[tuple[int, ...]]]:
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
        arrival_steps=tuple(sorted(steps)),
        overlap=draw(st.booleans()),
        prefix_cache=prefix_cache,
        prefix_host=draw(prefix_hosts(longest, prefix_cache)),
        num_draft_tokens=draw(st.sampled_from([0, 0, 1, 3])),
    )
    return replica, prompts


@settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(patterns())
def test_tiny_model_on_random_patterns(pattern: tuple[Replica, list[tuple[int, ...]]]) -> None:
    replica, prompts = pattern
    requests = serve(tiny(), replica, prompts, TINY_MAX_TOKENS)
    for request, prompt in zip(requests, prompts, strict=True):
        refused = was_refused(request, replica.policy)
        assert request.output_token_ids == ([] if refused else tiny_output(prompt))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_turn_of_a_conversation_finds_prompt_and_answer_in_the_cache(
    overlap: bool,
) -> None:
    first = tiny_prompt(30)
    second = (*first, *tiny_output(first), 5, 6, 7)
    replica = Replica(
        *("fcfs", Limits(), 64, 0, (0, 2 * TINY_MAX_TOKENS)),
        overlap=overlap,
        prefix_cache=PrefixCaching.HASH,
    )
    requests = serve(tiny(), replica, [first, second], TINY_MAX_TOKENS)
    assert [r.output_token_ids for r in requests] == [tiny_output(first), tiny_output(second)]
    # All but the first's last token were computed, 41 of which 40 are in full blocks of 4.
    assert [r.num_cached_tokens for r in requests] == [0, 40]


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
    replica = Replica(
        *("fcfs", Limits(), 15, 5, tuple(range(0, 80, 20))),
        overlap=overlap,
        prefix_cache=caching,
    )
    alone = serve(tiny(), replica, turns, TINY_MAX_TOKENS)
    replica = replace(replica, prefix_host=PrefixHost(80, writes))
    requests = serve(tiny(), replica, turns, TINY_MAX_TOKENS)
    assert [r.output_token_ids for r in requests] == [tiny_output(prompt) for prompt in turns]
    # All full blocks of the turn before, of which the last token was not computed.
    known = [0, 0, *((len(said) + TINY_MAX_TOKENS - 1) // 4 * 4 for said in turns[:-2])]
    assert [r.num_cached_tokens for r in requests] == known
    assert sum(r.num_cached_tokens for r in alone) < sum(known) / 2


@pytest.mark.parametrize("policy", ["fcfs", "vllm_v1"])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_of_one_step_share_what_the_first_of_them_computes(
    policy: str, overlap: bool
) -> None:
    """Every layer writes all keys of a step before it reads any."""
    prompts = [tiny_prompt(30), (*tiny_prompt(30)[:20], 5, 6), tiny_prompt(30)]
    replica = Replica(
        *(policy, Limits(), 64, 0, (0, 0, 0)), overlap=overlap, prefix_cache=PrefixCaching.HASH
    )
    requests = serve(tiny(), replica, prompts, TINY_MAX_TOKENS)
    assert [r.output_token_ids for r in requests] == list(map(tiny_output, prompts))
    assert [r.num_cached_tokens for r in requests] == [0, 20, 28]


def test_a_stop_token_ends_a_request_while_the_next_step_computes_on() -> None:
    output = tiny_output(tiny_prompt(11))
    stop = next(i for i, token in enumerate(output) if i >= 3 and token not in output[:i])
    requests = serve(
        tiny(),
        Replica("fcfs", Limits(), 32, 0, (0, 0), overlap=True),
        [tiny_prompt(11), tiny_prompt(30)],
        TINY_MAX_TOKENS,
        stop_token_ids=(output[stop],),
    )
    assert requests[0].output_token_ids == output[: stop + 1]
    assert requests[0].end_reason is EndReason.STOP
    other = tiny_output(tiny_prompt(30))
    end = other.index(output[stop]) + 1 if output[stop] in other else len(other)
    assert requests[1].output_token_ids == other[:end]
