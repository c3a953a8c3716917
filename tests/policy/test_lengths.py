"""The lengths of finished requests give the expected lengths of others."""

from __future__ import annotations

import pytest
from factories import make_request

from slosched.core import EndReason, Request
from slosched.policy.kit.lengths import OutputLengths


def ended(name: str, num_output_tokens: int, reason: EndReason = EndReason.STOP) -> Request:
    request = make_request(name)
    request.num_output_tokens = num_output_tokens
    request.end_reason, request.status = reason, reason.status
    return request


def test_expected_tokens_are_those_of_the_requests_that_were_longer() -> None:
    lengths = OutputLengths(prior_tokens=10)
    for request in (ended("a", 30), ended("b", 20)):
        lengths.watch(request)
    lengths.update()
    # 10, 20, 30: the mean is 20; of those above 10 it is 25; above 20 it is 30; none is above 30.
    assert lengths.expected_left([0, 10, 15, 20, 29, 30, 90]).tolist() == [20, 15, 10, 10, 1, 1, 1]


def test_a_quantile_of_the_longer_ones() -> None:
    lengths = OutputLengths(prior_tokens=10)
    for request in (ended("a", 30), ended("b", 20), ended("c", 40)):
        lengths.watch(request)
    lengths.update()
    assert lengths.upper_left([0, 10, 30, 40], quantile=0.5).tolist() == [20, 20, 10, 1]
    assert lengths.upper_left([0, 10, 30, 40], quantile=1.0).tolist() == [40, 30, 10, 1]


def test_only_finished_requests_count_and_each_once() -> None:
    lengths = OutputLengths(prior_tokens=4)
    running = make_request("running")
    for request in (ended("gone", 50, EndReason.CLIENT), running):
        lengths.watch(request)
    lengths.update()
    assert lengths.expected_left(0) == 4
    running.num_output_tokens, running.end_reason = 8, EndReason.LENGTH
    running.status = EndReason.LENGTH.status
    for _ in range(3):
        lengths.update()
    assert lengths.expected_left(0) == 6


def test_the_oldest_are_forgotten() -> None:
    lengths = OutputLengths(prior_tokens=1_000_000)
    for i in range(1000):
        lengths.watch(ended(f"r{i}", 7))
    lengths.update()
    assert lengths.expected_left(0) == 7


def test_an_impossible_prior_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        OutputLengths(0)
