"""With draft tokens greedy output is that of `generate`, in float32, and takes fewer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from greedy import generated
from served import GREEDY, Ask, Replica, serve

from slosched.core import EndReason, Limits, PreemptionMode, SamplingParams
from slosched.kv import PrefixCaching

if TYPE_CHECKING:
    from slosched.engine.torch import LoadedModel

TEXT = "The red fox runs. The blue fox runs. The red fox runs. The blue fox runs. The red fox"
OTHER = "Water boils at 100 degrees Celsius, but on the top of a high mountain, where"
MAX_TOKENS = 20


def ask(model: LoadedModel, text: str, sampling: SamplingParams = GREEDY) -> Ask:
    assert model.tokenizer is not None
    return Ask(model.tokenizer(text).input_ids, MAX_TOKENS, sampling)


GENERATED: dict[str, list[int]] = {}
"""The outputs of `generate` so far, by prompt."""


def plain(model: LoadedModel, text: str) -> list[int]:
    """Return the output of `generate`."""
    if text not in GENERATED:
        GENERATED[text] = generated(model, ask(model, text).prompt, MAX_TOKENS)
    return GENERATED[text]


@pytest.mark.model
@pytest.mark.parametrize(
    ("policy", "overlap", "prefix_cache"),
    [
        ("fcfs", False, PrefixCaching.OFF),
        pytest.param("goodput", True, PrefixCaching.HASH, marks=pytest.mark.slow),
        pytest.param("goodput", False, PrefixCaching.RADIX, marks=pytest.mark.slow),
        pytest.param("vllm_v1", True, PrefixCaching.HASH, marks=pytest.mark.slow),
    ],
)
def test_a_text_that_repeats_itself_takes_fewer_steps_and_has_the_same_tokens(
    smollm2: LoadedModel, policy: str, overlap: bool, prefix_cache: PrefixCaching
) -> None:
    texts = (TEXT, OTHER)
    asks = [ask(smollm2, text) for text in texts]
    replica = Replica(policy, overlap=overlap, prefix_cache=prefix_cache, num_draft_tokens=4)
    run = serve(smollm2, replica, asks)
    assert run.outputs == [plain(smollm2, text) for text in texts]
    assert run.num_accepted_drafts >= MAX_TOKENS // 2, "the text does not repeat itself"
    if prefix_cache is PrefixCaching.OFF:
        assert serve(smollm2, replica, asks[:1]).num_steps <= MAX_TOKENS // 2
    for request in run.requests:
        assert len(request.token_times_s) == MAX_TOKENS
        assert request.end_reason is EndReason.LENGTH


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("mode", PreemptionMode)
def test_requests_with_drafts_are_preempted_like_others(
    smollm2: LoadedModel, mode: PreemptionMode
) -> None:
    texts = (TEXT, OTHER, TEXT[:40])
    limits = Limits(preemption_mode=mode)
    replica = Replica(limits=limits, num_blocks=17, num_draft_tokens=4)
    run = serve(smollm2, replica, [ask(smollm2, text) for text in texts])
    assert sum(r.num_preemptions for r in run.requests) > 0
    assert run.outputs == [plain(smollm2, text) for text in texts]


@pytest.mark.model
def test_a_stop_token_among_accepted_drafts_ends_the_request_there(smollm2: LoadedModel) -> None:
    expected = plain(smollm2, TEXT)
    stop = expected[9]
    at = expected.index(stop)
    undrafted, drafted = Replica(), Replica(num_draft_tokens=4)
    sampling = SamplingParams(ignore_eos=True, stop_token_ids=(stop,))
    run = serve(smollm2, drafted, [ask(smollm2, TEXT, sampling)])
    assert run.outputs == [expected[: at + 1]]
    assert run.requests[0].end_reason is EndReason.STOP
    assert run.num_steps < at + 1
    sampling = SamplingParams(ignore_eos=True, stop_token_ids=(stop,), min_tokens=MAX_TOKENS)
    outputs = [
        serve(smollm2, each, [ask(smollm2, TEXT, sampling)]).outputs[0]
        for each in (undrafted, drafted)
    ]
    assert outputs[0] == outputs[1]
    assert stop not in outputs[0]


@pytest.mark.model
def test_a_seed_gives_the_same_tokens_with_drafts(smollm2: LoadedModel) -> None:
    asked = ask(smollm2, TEXT, SamplingParams(temperature=0.5, seed=7, ignore_eos=True))
    undrafted = serve(smollm2, Replica(), [asked])
    drafted = serve(smollm2, Replica(num_draft_tokens=4), [asked])
    assert drafted.outputs == undrafted.outputs
    assert drafted.num_steps < undrafted.num_steps
