"""With draft tokens greedy output is that of `generate`, in float32, and takes fewer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from factories import make_model
from greedy import generated

from slosched.core import SLO, EndReason, Limits, PreemptionMode, Request, SamplingParams
from slosched.engine.background import InBackground
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.overlap import OverlappedEngine
from slosched.kv import KVCache, PrefixCaching
from slosched.policy.spec import make_policy
from slosched.scheduler import PromptLookup, Scheduler, Speculation

if TYPE_CHECKING:
    from slosched.engine.torch import LoadedModel

TEXT = "The red fox runs. The blue fox runs. The red fox runs. The blue fox runs. The red fox"
OTHER = "Water boils at 100 degrees Celsius, but on the top of a high mountain, where"
MAX_TOKENS = 20
GREEDY = SamplingParams(ignore_eos=True)
PATIENT = SLO(ttft_s=3600.0, tpot_s=3600.0)


def ids(model: LoadedModel, text: str) -> list[int]:
    assert model.tokenizer is not None
    found: list[int] = model.tokenizer(text).input_ids
    return found


GENERATED: dict[str, list[int]] = {}
"""The outputs of `generate` so far, by prompt."""


def plain(model: LoadedModel, text: str) -> list[int]:
    """Return the output of `generate`."""
    if text not in GENERATED:
        GENERATED[text] = generated(model, ids(model, text), MAX_TOKENS)
    return GENERATED[text]


def run(
    model: LoadedModel,
    prompts: list[list[int]],
    *,
    policy: str = "fcfs",
    num_draft_tokens: int = 4,
    num_blocks: int = 64,
    overlap: bool = False,
    prefix_cache: PrefixCaching = PrefixCaching.OFF,
    sampling: SamplingParams = GREEDY,
    mode: PreemptionMode = PreemptionMode.RECOMPUTE,
) -> tuple[list[Request], int, Scheduler]:
    """Serve all prompts; return the requests, the number of steps, and the scheduler."""
    from slosched.engine.torch import TorchExecutor

    executor = TorchExecutor(model, num_blocks=num_blocks, block_size=4, num_host_blocks=64)
    kv = KVCache(num_blocks, 4, 64, prefix_cache.new_index())
    speculation = Speculation(PromptLookup(2, 4), num_draft_tokens) if num_draft_tokens else None
    limits = Limits(preemption_mode=mode)
    scheduler = Scheduler(make_policy(policy), kv, limits, make_model(), speculation)
    clock = MonotonicClock()
    engine = Engine(scheduler, executor, clock)
    if overlap:
        engine = OverlappedEngine(scheduler, InBackground(executor), clock)
    requests = [
        Request(
            request_id=f"r{i}",
            arrival_s=clock.now_s(),
            num_prompt_tokens=len(prompt),
            max_tokens=MAX_TOKENS,
            slo=PATIENT,
            prompt_token_ids=prompt,
            sampling=sampling,
        )
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        scheduler.add_request(request)
    num_steps = 0
    while engine.has_work:
        engine.step()
        kv.check()
        num_steps += 1
    assert kv.num_free_blocks == num_blocks
    return requests, num_steps, scheduler


@pytest.mark.model
@pytest.mark.parametrize(
    ("policy", "overlap", "prefix_cache"),
    [
        ("fcfs", False, PrefixCaching.OFF),
        ("goodput", True, PrefixCaching.HASH),
        pytest.param("goodput", False, PrefixCaching.RADIX, marks=pytest.mark.slow),
        pytest.param("vllm_v1", True, PrefixCaching.HASH, marks=pytest.mark.slow),
    ],
)
def test_a_text_that_repeats_itself_takes_fewer_steps_and_has_the_same_tokens(
    smollm2: LoadedModel, policy: str, overlap: bool, prefix_cache: PrefixCaching
) -> None:
    texts = (TEXT, OTHER)
    prompts = [ids(smollm2, text) for text in texts]
    requests, _, scheduler = run(
        smollm2, prompts, policy=policy, overlap=overlap, prefix_cache=prefix_cache
    )
    expected = [plain(smollm2, text) for text in texts]
    assert [r.output_token_ids for r in requests] == expected
    speculation = scheduler.speculation
    assert speculation is not None
    assert speculation.num_accepted >= MAX_TOKENS // 2, "the text does not repeat itself"
    if prefix_cache is PrefixCaching.OFF:
        _, num_alone, _ = run(smollm2, prompts[:1], policy=policy, overlap=overlap)
        assert num_alone <= MAX_TOKENS // 2
    for request in requests:
        assert len(request.token_times_s) == MAX_TOKENS
        assert request.end_reason is EndReason.LENGTH


@pytest.mark.model
@pytest.mark.parametrize(
    "mode",
    [
        PreemptionMode.SWAP,
        pytest.param(PreemptionMode.RECOMPUTE, marks=pytest.mark.slow),
    ],
)
def test_requests_with_drafts_are_preempted_like_others(
    smollm2: LoadedModel, mode: PreemptionMode
) -> None:
    texts = (TEXT, OTHER, TEXT[:40])
    prompts = [ids(smollm2, text) for text in texts]
    requests, _, _ = run(smollm2, prompts, num_blocks=17, mode=mode)
    assert sum(r.num_preemptions for r in requests) > 0
    expected = [plain(smollm2, text) for text in texts]
    assert [r.output_token_ids for r in requests] == expected


@pytest.mark.model
def test_a_stop_token_among_accepted_drafts_ends_the_request_there(smollm2: LoadedModel) -> None:
    prompt = ids(smollm2, TEXT)
    expected = plain(smollm2, TEXT)
    stop = expected[9]
    at = expected.index(stop)
    sampling = SamplingParams(ignore_eos=True, stop_token_ids=(stop,))
    requests, num_steps, _ = run(smollm2, [prompt], sampling=sampling)
    assert requests[0].output_token_ids == expected[: at + 1]
    assert requests[0].end_reason is EndReason.STOP
    assert num_steps < at + 1
    sampling = SamplingParams(ignore_eos=True, stop_token_ids=(stop,), min_tokens=MAX_TOKENS)
    undrafted, _, _ = run(smollm2, [prompt], num_draft_tokens=0, sampling=sampling)
    drafted, _, _ = run(smollm2, [prompt], sampling=sampling)
    assert drafted[0].output_token_ids == undrafted[0].output_token_ids
    assert stop not in undrafted[0].output_token_ids


@pytest.mark.model
def test_a_seed_gives_the_same_tokens_with_drafts(smollm2: LoadedModel) -> None:
    prompt = ids(smollm2, TEXT)
    sampling = SamplingParams(temperature=0.5, seed=7, ignore_eos=True)
    undrafted, num_undrafted, _ = run(smollm2, [prompt], num_draft_tokens=0, sampling=sampling)
    drafted, num_steps, _ = run(smollm2, [prompt], sampling=sampling)
    assert drafted[0].output_token_ids == undrafted[0].output_token_ids
    assert num_steps < num_undrafted
