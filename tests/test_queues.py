"""The queue that a policy sees behaves like any other sequence."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from factories import make_request

from slosched.scheduler.queues import InOrder


@pytest.mark.parametrize("size", [0, 1, 5])
def test_it_is_like_a_tuple(size: int) -> None:
    requests = tuple(make_request(f"r{i}") for i in range(size))
    queue = InOrder(OrderedDict((r.request_id, r) for r in requests))
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
    queue = InOrder(ordered)
    del ordered["r1"]
    assert [request.request_id for request in queue] == ["r0", "r2"]
