"""How many tokens a request emits: those that have ended say it, and those that go on as well."""

from __future__ import annotations

import pytest

from slosched.core import NO_SLO, SLO, EndReason, Request
from slosched.policy.kit.stays import Stays

PROMISED = SLO(ttft_s=1.0, tpot_s=0.05)


def emitting(name: str, num_tokens: int, slo: SLO = PROMISED) -> Request:
    request = Request(name, 0.0, 100, 1000, slo)
    request.num_output_tokens = num_tokens
    return request


def end(requests: list[Request], now_s: float, reason: EndReason = EndReason.STOP) -> None:
    for request in requests:
        request.end_reason, request.status, request.end_s = reason, reason.status, now_s


def test_tokens_of_those_that_go_on_count_and_one_end_beside_those_that_were() -> None:
    stays = Stays()
    short, long = [emitting(f"short {i}", 10) for i in range(3)], [emitting("long", 130)]
    stays.watch(short + long)
    end(short, 1.0)
    assert stays.mean_tokens(2.0) == (3 * 10 + 130) / (3 + 1)


def test_a_rejected_request_is_no_short_answer() -> None:
    stays = Stays()
    rejected, served = [emitting(f"no {i}", 0) for i in range(5)], [emitting("yes", 30)]
    stays.watch(rejected + served)
    end(rejected, 1.0, EndReason.OVERLOAD)
    end(served, 1.0)
    assert stays.mean_tokens(2.0) == 30 / 2


@pytest.mark.parametrize("num_best_effort", [0, 300])
def test_best_effort_says_nothing_about_the_answers_that_are_promised(
    num_best_effort: int,
) -> None:
    """More of it than requests are looked back at, all with long answers."""
    stays = Stays()
    promised = [emitting(f"promised {i}", 20 + i) for i in range(16)]
    others = [emitting(f"best effort {i}", 900, NO_SLO) for i in range(num_best_effort)]
    stays.watch(promised)
    stays.watch(others)
    end(promised + others, 1.0)
    assert stays.mean_of_latest() == sum(range(20, 36)) / 16
    assert stays.lengths() == list(range(20, 36))


def test_few_ends_say_nothing_about_the_latest() -> None:
    stays = Stays()
    few = [emitting(f"r{i}", 20) for i in range(15)]
    stays.watch(few)
    end(few, 1.0)
    assert stays.mean_of_latest() == 0.0
    assert stays.lengths() == []
