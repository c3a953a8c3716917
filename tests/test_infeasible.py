"""What becomes of a request that a plan rejects, in the scheduler: no server, no policy's rule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from factories import make_request, make_scheduler

from slosched.batch import BatchBuilder
from slosched.core import (
    NO_SLO,
    SLO,
    DeadlineRule,
    EndReason,
    OnInfeasible,
    Policy,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    fan_out,
)
from slosched.metrics import RequestRecord, is_good
from slosched.scheduler import Scheduler


@dataclass
class RejectsTight(Policy):
    """Rejects what has a TTFT below `least_s`, for `reason`; computes 4 tokens of the rest."""

    least_s: float
    reason: EndReason = EndReason.INFEASIBLE
    num_rejected: int = field(default=0, init=False)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        batch = BatchBuilder(view)
        for request in (*view.running, *view.waiting):
            if request.slo.ttft_s < self.least_s and not request.num_output_tokens:
                batch.reject(request, self.reason)
                self.num_rejected += 1
            else:
                batch.add(request, 4)
        return batch.build()


def scheduled(policy: RejectsTight, request: Request) -> Scheduler:
    """Return a scheduler that was given the request and has planned one step."""
    scheduler = make_scheduler(policy)
    scheduler.add_request(request)
    scheduler.schedule(0.0)
    return scheduler


def tight(on_infeasible: OnInfeasible) -> Request:
    request = make_request(ttft_s=1.0, tpot_s=0.05)
    request.on_infeasible = on_infeasible
    return request


def test_by_default_it_ends() -> None:
    request = tight(OnInfeasible.REJECT)
    scheduled(RejectsTight(2.0), request)
    assert (request.status, request.end_reason) == (RequestStatus.REJECTED, EndReason.INFEASIBLE)


def test_a_relegated_request_goes_on_without_an_slo_and_is_judged_by_what_it_asked_for() -> None:
    request = tight(OnInfeasible.RELEGATE)
    scheduler = scheduled(RejectsTight(2.0), request)
    assert (request.status, request.slo, request.is_relegated) == (
        RequestStatus.WAITING,
        NO_SLO,
        True,
    )
    assert request.deadline_s == NO_SLO.ttft_s
    assert scheduler.schedule(0.0).chunks
    assert RequestRecord.from_request(request).slo == SLO(1.0, 0.05)


def test_one_that_is_served_in_any_case_asks_for_twice_as_much_until_it_is_let_in() -> None:
    """1 s becomes 2, 4, 8 s, which the policy takes; the request is judged by 1 s."""
    request, policy = tight(OnInfeasible.SERVE), RejectsTight(5.0)
    scheduler = scheduled(policy, request)
    for _ in range(3):
        scheduler.schedule(0.0)
    assert policy.num_rejected == 3
    assert (request.slo, request.deadline_s) == (SLO(8.0, 0.4), 8.0)
    assert request.status is RequestStatus.RUNNING
    assert RequestRecord.from_request(request).slo == SLO(1.0, 0.05)


@pytest.mark.parametrize("on_infeasible", OnInfeasible)
def test_a_full_queue_is_no_matter_of_an_slo(on_infeasible: OnInfeasible) -> None:
    request = tight(on_infeasible)
    scheduled(RejectsTight(2.0, EndReason.QUEUE_FULL), request)
    assert request.end_reason is EndReason.QUEUE_FULL


def test_a_policy_that_rejects_whatever_is_asked_for_ends_it() -> None:
    request, policy = tight(OnInfeasible.SERVE), RejectsTight(float("inf"))
    scheduler = scheduled(policy, request)
    for _ in range(30):
        scheduler.schedule(0.0)
    assert request.end_reason is EndReason.INFEASIBLE
    assert policy.num_rejected < 30


def test_a_begun_prompt_gives_its_blocks_back_and_waits() -> None:
    request, policy = tight(OnInfeasible.RELEGATE), RejectsTight(0.5)
    scheduler = scheduled(policy, request)
    assert (request.status, request.num_computed_tokens) == (RequestStatus.RUNNING, 4)
    policy.least_s = 2.0
    scheduler.schedule(0.1)
    assert (request.status, request.num_computed_tokens) == (RequestStatus.WAITING, 0)
    assert scheduler.kv.num_free_blocks == scheduler.kv.num_blocks
    scheduler.schedule(0.2)
    assert request.status is RequestStatus.RUNNING


def test_the_siblings_of_a_relegated_request_are_relegated_with_it() -> None:
    request = tight(OnInfeasible.RELEGATE)
    members = fan_out(request, 3)
    scheduled(RejectsTight(2.0), request)
    assert [member.slo for member in members] == [NO_SLO] * 3
    assert all(member.is_relegated for member in members)


def test_what_was_relegated_is_not_good_however_soon_it_was_served() -> None:
    request = tight(OnInfeasible.RELEGATE)
    scheduled(RejectsTight(2.0), request)
    request.status, request.end_reason = RequestStatus.FINISHED, EndReason.STOP
    request.num_output_tokens, request.token_times_s = 1, [request.arrival_s + 0.1]
    record = RequestRecord.from_request(request)
    assert not is_good(record, DeadlineRule.MEAN_TPOT)
    assert is_good(replace(record, is_relegated=False), DeadlineRule.MEAN_TPOT)
