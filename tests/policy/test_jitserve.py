"""jitserve against densities and choices computed by hand.

A step of one decode takes v = 10 ms, and an output is expected to have 100 tokens.
"""

from __future__ import annotations

import pytest
from views import R, flat_model, view_of

from slosched.core import EndReason, SchedulerOutput
from slosched.policy.kit.drop import Drop
from slosched.policy.published.jitserve import JITServe
from slosched.testing import check_policy

MODEL = flat_model(constant_s=9.95e-3, per_token_s=50e-6)


def make(**options: object) -> JITServe:
    fields: dict[str, object] = {"prior_output_tokens": 100, "patience": 0.0}
    return JITServe(**(fields | options))  # type: ignore[arg-type]


def densities(requests: list[R], now_s: float = 0.0, **options: object) -> dict[str, float]:
    policy = make(**options)
    policy.schedule(view_of(requests, MODEL, now_s=now_s))
    return policy._densities


def test_density_is_value_by_the_time_that_is_left() -> None:
    """The prompt: 1,000 + 8 * 100 for 1 s.  The decode with 60 of 100 tokens: 200 + 8 * 100 for 0.4
    s."""
    prompt, decode = R("p", 1000, due_s=1.0), R("d", 260, due_s=1.0, out=60)
    assert densities([prompt, decode]) == pytest.approx({"p": 1800, "d": 2500})


@pytest.mark.parametrize("penalty", [1.0, 2.0])
def test_late_tokens_lose_value(penalty: float) -> None:
    """10 s after arrival: TTFT 1 s of 10.05995 s; 1 + 99 * 0.05 = 5.95 s of 10 + 1 s."""
    value = 1000 * (1 / 10.05995) ** penalty + 800 * (5.95 / 11) ** penalty
    found = densities([R("p", 1000, due_s=1.0)], now_s=10.0, penalty=penalty)
    assert found["p"] == pytest.approx(value)


def test_a_first_token_is_expected_after_what_is_left_of_the_prompt() -> None:
    """After 1 s, 500 of 1,000 tokens take 34.95 ms, so the TTFT of 1.04 s is kept."""
    half, whole = R("h", 1000, due_s=1.04, done=500), R("w", 1000, due_s=1.04)
    found = densities([half, whole], now_s=1.0)
    assert found["h"] == pytest.approx(1800)
    assert found["w"] == pytest.approx(1000 * 1.04 / 1.05995 + 800)


def test_waiting_raises_the_density() -> None:
    """Frames of 50 * 10 ms: two in a second, with 1 % each."""
    found = densities([R("p", 1000, due_s=2.0)], now_s=1.0, patience=0.01)
    assert found["p"] == pytest.approx(1.02 * 1800)


def test_gmax_takes_neighbours_in_length_that_are_nearly_the_best() -> None:
    """B = 2: all but e are within 95 % of the second best, 10; the windows are 19.8, 19.4, 19.6."""
    policy = make()
    policy._densities = {"a": 10.0, "b": 9.6, "c": 9.8, "d": 10.0, "e": 1.0}
    lengths = {"a": 100, "b": 5000, "c": 110, "d": 6000, "e": 105}
    pending = view_of([R(name, n, due_s=1.0) for name, n in lengths.items()]).waiting
    assert policy._choose(pending, 2) == {"a", "c"}
    policy.cutoff = 1.0
    assert policy._choose(pending, 2) == {"a", "d"}


@pytest.mark.parametrize(("tokens", "is_preempted"), [(5000, True), (230, False)])
def test_a_preemption_must_earn_more_than_it_costs(tokens: int, is_preempted: bool) -> None:
    """The decode earns 1,000 / 0.99 s; recomputing it takes 9.95 + 10 ms, worth 20.2.

    Over a frame of 0.5 s a prompt of 5,000 gains (5800 - 1010) / 2 = 2395, one of 230 gains 10.
    """
    queue = [R("d", 201, due_s=1.0, out=1), R("p", tokens, due_s=1.0)]
    output = make(max_batch=1, token_budget=10_000).schedule(view_of(queue, MODEL))
    assert output.preempted == (("d",) if is_preempted else ())
    assert output.num_scheduled_tokens == ({"p": tokens} if is_preempted else {"d": 1})


def test_the_choice_stands_until_the_frame_ends() -> None:
    policy = make(max_batch=1, frame_steps=3)
    decode, prompt = R("d", 201, due_s=1.0, out=1), R("p", 5000, due_s=1.0)
    policy.schedule(view_of([decode], MODEL))
    outputs = [policy.schedule(view_of([decode, prompt], MODEL)) for _ in range(3)]
    assert [output.preempted for output in outputs] == [(), (), ("d",)]


def test_within_a_frame_prompts_run_by_density() -> None:
    """Each has the density (p + 800) / 1 s, so the longest earns most."""
    queue = [R("short", 100, due_s=1.0), R("long", 300, due_s=1.0), R("mid", 200, due_s=1.0)]
    output: SchedulerOutput = make(token_budget=450).schedule(view_of(queue, MODEL))
    assert dict(output.num_scheduled_tokens) == {"long": 300, "mid": 150}


def test_dropping_is_an_option() -> None:
    queue = [R("p", 100, due_s=-0.1), R("q", 100, due_s=1.0)]
    assert not make().schedule(view_of(queue, MODEL)).rejected
    output = make(drop=Drop.EXPIRED).schedule(view_of(queue, MODEL))
    assert output.rejected == {"p": EndReason.EXPIRED}


def test_it_obeys_the_laws_with_small_batches_and_short_frames() -> None:
    small = {"max_batch": 2, "frame_steps": 2, "token_budget": 24}
    check_policy(lambda: make(**small), max_examples=12, conserves_work=False)


@pytest.mark.parametrize("option", ["max_batch", "frame_steps", "cutoff", "quantile"])
def test_an_impossible_option_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be .* not 0"):
        JITServe(**{option: 0})
