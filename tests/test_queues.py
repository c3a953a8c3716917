"""The queue that a policy sees behaves like any other sequence."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from factories import make_request

from slosched.core import Request
from slosched.scheduler.queues import InOrder, Queues


@pytest.mark.parametrize("kind", [OrderedDict, dict])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_it_is_like_a_tuple(size: int, kind: type[dict[str, Request]]) -> None:
    requests = tuple(make_request(f"r{i}") for i in range(size))
    queue = InOrder(Queues(waiting=kind((r.request_id, r) for r in requests)))
    assert tuple(queue) == requests
    assert tuple(reversed(queue)) == requests[::-1]
    assert len(queue) == size
    assert bool(queue) == bool(requests)
    for i in range(-size, size):
        assert queue[i] is requests[i]
        assert queue[i:] == requests[i:]
    for i in (size, -size - 1):
        with pytest.raises(IndexError, match=f"no request {i} in a queue of {size}"):
            queue[i]


def test_it_follows_the_queue() -> None:
    ordered = OrderedDict((f"r{i}", make_request(f"r{i}")) for i in range(3))
    queue = InOrder(Queues(waiting=ordered))
    del ordered["r1"]
    assert [request.request_id for request in queue] == ["r0", "r2"]


def test_only_an_ordered_queue_takes_one_in_front() -> None:
    first, second = make_request("r1"), make_request("r2")
    queues = Queues(waiting=OrderedDict(r1=first))
    queues.put_first(second)
    assert list(queues.waiting) == ["r2", "r1"]
    with pytest.raises(AssertionError, match="a plain dict cannot take one in front"):
        Queues(waiting={"r1": first}).put_first(second)
