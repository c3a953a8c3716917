"""slo_aware and slo_aware_literal against worked examples, and against the literal retry loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from factories import make_model
from hypothesis import assume, given
from hypothesis import strategies as st

from slosched.core import (
    SLO,
    BatchShape,
    DecodeGroup,
    EndReason,
    Limits,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
)
from slosched.kv import KVCache
from slosched.perfmodel import AttentionWork, LinearCoefficients, LinearModel
from slosched.policy import SLOAware, SLOAwareLiteral
from slosched.policy.kit.urgency_queue import UrgencyQueue
from slosched.policy.slo_aware import EarlyReject, Pack
from slosched.policy.spec import tried_values

WHOLE_PROMPTS = 10**6
"""A value of `min_chunk_tokens` with which a prompt runs as a whole or not at all."""

EXAMPLE_MODEL = LinearModel(
    LinearCoefficients(50e-6, 10e-9, 1e-6, 500e-6, 2e-3, 1e-3, 5e-3), AttentionWork.LITERAL
)
"""0.05 ms a token, 1e-5 ms for a prompt token squared, 0.001 ms a token of context, 0.5 ms a tile
of 64, 2 ms if there are decodes, 1 ms a swapped block, and 5 ms."""


@dataclass(frozen=True)
class Q:
    """One request of an example: a prompt, a decode or a swapped decode, and its slack in ms."""

    name: str
    kind: str
    tokens: int
    slack_ms: float


def make_view(queue: Sequence[Q], model: LinearModel = EXAMPLE_MODEL) -> SchedulerView:
    kv = KVCache(num_blocks=1000, block_size=8192, num_host_blocks=100)
    queues: dict[RequestStatus, list[Request]] = {status: [] for status in RequestStatus}
    for q in queue:
        is_prompt = q.kind == "P"
        request = Request(
            request_id=q.name,
            arrival_s=0.0,
            num_prompt_tokens=q.tokens if is_prompt else q.tokens - 1,
            max_tokens=100,
            slo=SLO(1.0, 1.0),
            deadline_s=q.slack_ms / 1e3,
        )
        if not is_prompt:
            request.num_output_tokens = 1
            request.num_computed_tokens = q.tokens - 1
            kv.grow(q.name, q.tokens - 1)
            request.status = RequestStatus.RUNNING
        if q.kind == "S":
            kv.swap_out(q.name)
            request.status = RequestStatus.SWAPPED
        queues[request.status].append(request)
    return SchedulerView(
        now_s=0.0,
        waiting=queues[RequestStatus.WAITING],
        running=queues[RequestStatus.RUNNING],
        swapped=queues[RequestStatus.SWAPPED],
        kv=kv,
        limits=Limits(max_num_batched_tokens=100_000),
        latency_model=model,
    )


def decide(queue: Sequence[Q], **readings: object) -> SchedulerOutput:
    """Decide by the published algorithm, with prompts that run whole unless `readings` differ."""
    fields: dict[str, object] = {"min_chunk_tokens": WHOLE_PROMPTS}
    return SLOAwareLiteral(**(fields | readings)).schedule(make_view(queue))


def predicted_ms(output: SchedulerOutput) -> float:
    assert output.shape is not None
    return 1e3 * EXAMPLE_MODEL.predict(output.shape)


@pytest.mark.parametrize(
    ("queue", "scheduled", "milliseconds"),
    [
        pytest.param(
            [Q("d1", "D", 100, 50), Q("d2", "D", 200, 60), Q("p1", "P", 128, 500)],
            {"d1", "d2", "p1"},
            15.464,
            id="E1 all fit",
        ),
        pytest.param(
            [Q("d1", "D", 100, 30), Q("p1", "P", 600, 2000), Q("p2", "P", 100, 3000)],
            {"d1", "p2"},
            13.25,
            id="E2 the urgent decode bounds the batch",
        ),
        pytest.param(
            [Q("d1", "D", 100, -5), Q("d2", "D", 100, 40), Q("p1", "P", 64, 500)],
            {"d1", "d2"},
            7.8,
            id="E4 something late: decodes go on",
        ),
        pytest.param(
            [Q("p1", "P", 300, 33), Q("d1", "D", 4000, 40), Q("d2", "D", 4000, 45)],
            {"d1", "d2"},
            15.6,
            id="E5 the prefill is evicted for the decodes",
        ),
        pytest.param(
            [Q("p0", "P", 2000, 163), Q("p1", "P", 100, 165), Q("p2", "P", 100, 166)],
            {"p1", "p2"},
            17.2,
            id="E6 the cascade is refused",
        ),
        pytest.param(
            [Q("s1", "S", 100, 12), Q("d1", "D", 100, 13)],
            {"s1", "d1"},
            8.8,
            id="E7 a swap costs C6",
        ),
    ],
)
def test_worked_examples(queue: list[Q], scheduled: set[str], milliseconds: float) -> None:
    """Each time is the formula's, with the constants of `EXAMPLE_MODEL`, worked out by hand."""
    output = decide(queue)
    assert set(output.num_scheduled_tokens) == scheduled
    assert predicted_ms(output) == pytest.approx(milliseconds, abs=5e-4)
    assert not output.rejected


@pytest.mark.parametrize("cautious", [False, True])
def test_cautious_leaves_room_for_the_steps_that_take_longer(cautious: bool) -> None:
    """A decode has 32 ms of slack; one step in a hundred takes 25 % longer than predicted."""
    model = LinearModel(
        EXAMPLE_MODEL.coefficients, AttentionWork.LITERAL, held_out_error={"under_p99": 20.0}
    )
    view = make_view([Q("d1", "D", 100, 32), Q("p1", "P", 1000, 2000)], model)
    output = SLOAware(cautious=cautious).schedule(view)
    shape = output.shape
    assert shape is not None
    limit_s = 0.032
    predict = model.predict_upper if cautious else model.predict
    assert predict(shape) < limit_s
    larger = BatchShape()
    larger.add(1, 99)
    larger.add(output.num_scheduled_tokens["p1"] + 1, 0)
    assert predict(larger) >= limit_s


def test_an_expired_prompt_is_rejected() -> None:
    output = decide([Q("p1", "P", 100, -1), Q("p2", "P", 100, 500)])
    assert output.rejected == {"p1": EndReason.EXPIRED}
    assert set(output.num_scheduled_tokens) == {"p2"}


@pytest.mark.parametrize(("surplus_ms", "tokens"), [(-1e-6, 63), (1e-6, 64)])
def test_the_limit_is_strict_and_a_prompt_is_cut_to_it(surplus_ms: float, tokens: int) -> None:
    """A predicted time equal to the slack is refused, so the largest chunk is one token shorter."""
    time_ms = 5 + 0.05 * 64 + 1e-5 * 64**2 + 0.5
    output = decide([Q("p1", "P", 64, time_ms + surplus_ms)], min_chunk_tokens=8)
    assert output.num_scheduled_tokens == {"p1": tokens}


def test_a_cascade_is_rejected_for_good_if_told_so() -> None:
    queue = [Q("p0", "P", 2000, 163), Q("p1", "P", 100, 165), Q("p2", "P", 100, 166)]
    output = decide(queue, early_reject=EarlyReject.FINAL)
    assert output.rejected == {"p0": EndReason.CASCADE}
    assert set(output.num_scheduled_tokens) == {"p1", "p2"}
    assert not decide(queue, cascade=3).rejected
    assert "p0" in decide(queue, cascade=3).num_scheduled_tokens


def test_a_cascade_counts_only_what_is_left_of_cached_prompts() -> None:
    """Each of both takes 150 ms whole and 11 ms with what the prefix cache has of it."""
    view = make_view([Q("p0", "P", 2000, 163), Q("p1", "P", 2000, 164)])
    for request in view.waiting:
        request.num_computed_tokens = 1900
    output = SLOAware(early_reject=EarlyReject.FINAL).schedule(view)
    assert not output.rejected
    assert output.num_scheduled_tokens == {"p0": 100, "p1": 100}


def test_a_late_decode_binds_the_batch_only_to_the_letter() -> None:
    queue = [Q("d1", "D", 100, -5), Q("d2", "D", 100, 40), Q("p1", "P", 64, 500)]
    output = SLOAware(min_chunk_tokens=8).schedule(make_view(queue))
    assert set(output.num_scheduled_tokens) == {"d1", "d2", "p1"}
    literal = SLOAwareLiteral().schedule(make_view(queue))
    assert set(literal.num_scheduled_tokens) == {"d1", "d2"}


def test_to_the_letter_every_waiting_prompt_is_tested_for_a_cascade_and_none_rejected() -> None:
    """Each of nine prompts of 95.4 ms would make two of 11.1 ms late that are due in 105 ms."""
    long = [Q(f"p{i}", "P", 1280, 100 + i / 10) for i in range(9)]
    queue = [*long, Q("a", "P", 100, 105), Q("b", "P", 100, 106)]
    literal = SLOAwareLiteral().schedule(make_view(queue))
    assert set(literal.num_scheduled_tokens) == {"a", "b"}
    assert not literal.rejected
    ours = SLOAware().schedule(make_view(queue))
    assert list(ours.rejected.values()) == [EndReason.CASCADE] * 8
    assert "p8" in ours.num_scheduled_tokens


def test_what_the_source_says_is_not_tuned() -> None:
    assert set(tried_values(SLOAwareLiteral)) == {"cascade"}
    assert "late" in tried_values(SLOAware)


class Patient(SLOAware):
    """Leaves no request out for the sake of others."""

    def new_pack(
        self, queue: UrgencyQueue, limit_s: float, beside: DecodeGroup | None = None
    ) -> Pack:
        return PatientPack(self, queue, limit_s, beside)


class PatientPack(Pack):
    def cascades(self, request: Request) -> bool:
        return False


def test_a_subclass_may_replace_the_packing() -> None:
    queue = [Q("p0", "P", 2000, 163), Q("p1", "P", 100, 165), Q("p2", "P", 100, 166)]
    assert SLOAware().schedule(make_view(queue)).rejected == {"p0": EndReason.CASCADE}
    assert "p0" in Patient().schedule(make_view(queue)).num_scheduled_tokens


def test_if_nobody_can_be_in_time_the_decodes_go_on_without_prefills() -> None:
    """The progress rule: a prompt that would be late, too, must not delay the late decodes."""
    queue = [Q("d1", "D", 100, -5), Q("p1", "P", 2000, 20)]
    output = SLOAware().schedule(make_view(queue))
    assert set(output.num_scheduled_tokens) == {"d1"}


def test_without_promises_there_is_no_time_limit() -> None:
    queue = [Q("d1", "D", 100, math.inf), Q("p1", "P", 2000, math.inf)]
    output = SLOAware(margin=0.1).schedule(make_view(queue))
    assert output.num_scheduled_tokens == {"d1": 1, "p1": 2000}


def test_a_prompt_is_cut_to_the_time_that_the_decodes_leave() -> None:
    queue = [Q("p1", "P", 3000, 900), Q("d1", "D", 100, 40)]
    output = SLOAware().schedule(make_view(queue))
    assert output.num_scheduled_tokens["d1"] == 1
    chunk = output.num_scheduled_tokens["p1"]
    assert 0 < chunk < 3000
    assert predicted_ms(output) < 40
    longer = BatchShape()
    longer.add(1, 99)
    longer.add(chunk + 1, 0)
    assert 1e3 * EXAMPLE_MODEL.predict(longer) >= 40


def test_the_margin_leaves_time_unused() -> None:
    queue = [Q("p1", "P", 3000, 900), Q("d1", "D", 100, 40)]
    output = SLOAware(margin=0.25).schedule(make_view(queue))
    assert predicted_ms(output) < 30


def test_without_a_latency_model_it_says_so() -> None:
    view = make_view([Q("p1", "P", 10, 100)])
    bare = SchedulerView(0.0, view.waiting, (), (), view.kv, view.limits, None)
    with pytest.raises(ValueError, match="latency model"):
        SLOAware().schedule(bare)


def literal_pack(
    queue: Sequence[Q], limit_s: float, model: LinearModel, least_tokens: int
) -> dict[str, int]:
    """Return the tokens of each request by steps 3 and 4: add or drop, evict one, pack again.

    A prompt that does not fit is cut to the largest chunk that does, of `least_tokens` at least,
    and no prompt is added after it.
    """
    order = sorted(queue, key=lambda q: q.slack_ms)
    evicted: list[Q] = []
    while True:
        batch, refused = literal_attempt(
            [], [q for q in order if q not in evicted], limit_s, model, least_tokens
        )
        prefills = [q for q in batch if q.kind == "P"]
        if not (refused and prefills):
            break
        # A prompt that is less urgent than the evicted one must not take its place.
        last_ms = prefills[-1].slack_ms
        evicted += [q for q in order if q.kind == "P" and q.slack_ms >= last_ms]
    batch, _ = literal_attempt(
        batch, [q for q in order if q in evicted], limit_s, model, least_tokens
    )
    return {q.name: q.tokens if q.kind == "P" else 1 for q in batch}


def literal_attempt(
    batch: Sequence[Q], queue: Sequence[Q], limit_s: float, model: LinearModel, least_tokens: int
) -> tuple[list[Q], bool]:
    """Add the requests of `queue` to a batch in order; tell also whether a decode did not fit."""
    batch, refused, is_full = list(batch), False, False
    for q in queue:
        if q.kind != "P":
            fits = time_s([*batch, q], model) < limit_s
            batch += [q] if fits else []
            refused |= not fits
        elif not is_full:
            chunk = largest_chunk(batch, q, limit_s, model, least_tokens)
            batch += [replace(q, tokens=chunk)] if chunk else []
            is_full = 0 < chunk < q.tokens
    return batch, refused


def largest_chunk(
    batch: Sequence[Q], q: Q, limit_s: float, model: LinearModel, least_tokens: int
) -> int:
    """Return the most tokens of a prompt that fit, or 0; each number is tried by itself."""
    for tokens in range(q.tokens, min(q.tokens, least_tokens) - 1, -1):
        if time_s([*batch, replace(q, tokens=tokens)], model) < limit_s:
            return tokens
    return 0


def time_s(batch: Sequence[Q], model: LinearModel) -> float:
    shape = BatchShape()
    for q in batch:
        if q.kind == "P":
            shape.add(q.tokens, 0)
        else:
            shape.add(1, q.tokens - 1)
            shape.num_swapped_blocks += q.kind == "S"
    return model.predict(shape)


@st.composite
def queues(draw: st.DrawFn) -> list[Q]:
    kinds = draw(st.lists(st.sampled_from("PDS"), min_size=1, max_size=10))
    slacks = draw(
        st.lists(
            st.integers(min_value=5, max_value=400),
            min_size=len(kinds),
            max_size=len(kinds),
            unique=True,
        )
    )
    return [
        Q(f"{kind}{i}", kind, draw(st.integers(min_value=2, max_value=3000)), slack)
        for i, (kind, slack) in enumerate(zip(kinds, slacks, strict=True))
    ]


@given(queues(), st.sampled_from([1, 32, WHOLE_PROMPTS]))
def test_packing_decodes_first_is_what_evicting_and_retrying_comes_to(
    queue: list[Q], least_tokens: int
) -> None:
    """Checks the docstring's claim that no retry is needed against a loop that retries.

    If not even the decodes fit together, no prefill runs in either; those cases are left out here.
    """
    model = make_model()
    limit_s = min(q.slack_ms for q in queue) / 1e3
    assume(time_s([q for q in queue if q.kind != "P"], model) < limit_s)
    expected = literal_pack(queue, limit_s, model, least_tokens)
    assume(expected)
    policy = SLOAwareLiteral(early_reject=EarlyReject.OFF, min_chunk_tokens=least_tokens)
    output = policy.schedule(make_view(queue, model))
    assert output.num_scheduled_tokens == expected
