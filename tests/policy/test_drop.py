"""What is left of a view after a step has rejected some of its requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from views import R, view_of

from slosched.batch import BatchBuilder
from slosched.core import EndReason, Request, latest_first
from slosched.policy.kit import without_rejected
from slosched.scheduler.queues import InOrder, Queues


def waiting(number: int) -> list[Request]:
    return [R(f"w{i}", 10, due_s=1.0).request() for i in range(number)]


@pytest.mark.parametrize("gone", [(0,), (1, 4), (0, 1, 2, 3, 4)])
def test_what_waits_is_like_a_tuple_without_the_rejected(gone: tuple[int, ...]) -> None:
    requests = waiting(5)
    batch = BatchBuilder(view := view_of(requests))
    for i in gone:
        batch.reject(requests[i], EndReason.EXPIRED)
    kept = tuple(r for i, r in enumerate(requests) if i not in gone)
    left = without_rejected(batch, view).waiting
    assert tuple(left) == kept  # before and after it was copied
    assert len(left) == len(kept)
    assert bool(left) == bool(kept)
    assert tuple(left) == kept
    assert tuple(reversed(left)) == tuple(latest_first(left)) == kept[::-1]
    assert left[1:] == kept[1:]
    assert [left[i] for i in range(len(kept))] == list(kept)


def test_newcomers_are_found_where_the_queue_has_them() -> None:
    """A queue by priority may have its latest requests in front."""

    class ByPriority(InOrder):
        def latest_first(self) -> Iterable[Request]:
            return iter(self)

    requests = waiting(3)
    queues = Queues(waiting={r.request_id: r for r in requests})
    view = replace(view_of(requests), waiting=ByPriority(queues))
    batch = BatchBuilder(view)
    batch.reject(requests[1], EndReason.EXPIRED)
    left = without_rejected(batch, view).waiting
    assert list(latest_first(left)) == [requests[0], requests[2]]
    assert list(latest_first(requests)) == requests[::-1]


def test_what_is_rejected_later_stays_in_the_view() -> None:
    """A view is of one moment, however late somebody looks at it."""
    requests = waiting(3)
    batch = BatchBuilder(view := view_of(requests))
    batch.reject(requests[0], EndReason.EXPIRED)
    left = without_rejected(batch, view).waiting
    batch.reject(requests[1], EndReason.EXPIRED)
    assert list(left) == requests[1:]
    assert len(left) == 2


def test_a_rejected_prompt_that_has_begun_leaves_the_running_ones() -> None:
    begun, other = (
        R("begun", 10, due_s=1.0, done=4).request(),
        R("other", 10, 1.0, done=4).request(),
    )
    batch = BatchBuilder(view := view_of([begun, other, *waiting(1)]))
    batch.reject(begun, EndReason.EXPIRED)
    left = without_rejected(batch, view)
    assert list(left.running) == [other]
    assert [r.request_id for r in left.waiting] == ["w0"]
    assert len(left.waiting) == 1
    batch.reject(left.waiting[0], EndReason.EXPIRED)
    left = without_rejected(batch, left)
    assert list(left.running) == [other]
    assert list(left.waiting) == []
    assert len(left.waiting) == 0
