"""Quotes and refusals over HTTP: T = 5 ms + 0.05 ms a token, as far as the scheduler knows."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from live_server import Live, live
from views import FLAT

from slosched.core import SLO, EndReason, Limits, OnInfeasible, Request
from slosched.kv import PrefixCaching
from slosched.policy import EDF, FCFS, Door
from slosched.policy.door import Refuse
from slosched.policy.kit import Drop

KEEPABLE = SLO(ttft_s=1.0, tpot_s=0.05)


@pytest.fixture
def server() -> Iterator[Live]:
    with live(Door(EDF()), model=FLAT, default_slo=KEEPABLE) as running:
        yield running


@pytest.fixture
def first_come() -> Iterator[Live]:
    """Yield a server that serves in order of arrival."""
    with live(Door(FCFS()), model=FLAT, default_slo=KEEPABLE) as running:
        yield running


def quoted(server: Live, query: str) -> dict[str, object]:
    status, text = server.get(f"/v1/quote?{query}")
    assert status == 200, text
    document = json.loads(text)
    assert isinstance(document, dict)
    return document


def test_a_quote_has_quantiles_of_both_times(server: Live) -> None:
    """On an idle device 100 tokens take 10 ms and a decode 5.05 ms."""
    quote = quoted(server, "prompt_tokens=100")
    assert (quote["object"], quote["prompt_tokens"], quote["would_refuse"]) == ("quote", 100, None)
    assert (quote["num_requests_waiting"], quote["num_requests_running"]) == (0, 0)
    for name, about_ms in (("ttft_ms", 10.0), ("tpot_ms", 5.05)):
        times_ms = quote[name]
        assert isinstance(times_ms, dict)
        assert list(times_ms) == ["p10", "p50", "p90", "p99"]
        assert list(times_ms.values()) == sorted(times_ms.values())
        assert times_ms["p50"] == pytest.approx(about_ms, rel=0.05)


def test_the_first_quote_counts_what_the_server_adds() -> None:
    """Nothing was learnt: the prefill takes 10 ms, the server outside of the engine 200 ms."""
    door = Door(EDF())
    with live(door, model=FLAT, default_slo=KEEPABLE, per_request_s=0.2) as running:
        ttft_ms = quoted(running, "prompt_tokens=100")["ttft_ms"]
        assert isinstance(ttft_ms, dict)
        assert ttft_ms["p50"] == pytest.approx(210.0, rel=0.05)
        asked = quoted(running, "prompt_tokens=100&slo_ttft_ms=205")
        assert asked["would_refuse"] == "unkeepable"


def test_a_quote_says_what_would_be_refused_and_changes_nothing(server: Live) -> None:
    for _ in range(2):
        assert quoted(server, "prompt_tokens=100&slo_ttft_ms=4")["would_refuse"] == "unkeepable"
    assert server.worker.metrics.num_ended(EndReason.UNKEEPABLE) == 0


def test_a_quote_says_what_is_promised_and_the_time_alone_on_the_device(server: Live) -> None:
    quote = quoted(server, "prompt_tokens=100&slo_ttft_ms=400")
    assert quote["promised_ms"] == {"ttft": 400.0, "tpot": 50.0}
    assert quote["alone_ms"] == pytest.approx({"ttft": 10.0, "tpot": 5.05})


def test_a_promise_without_a_limit_is_null() -> None:
    with live(Door(FCFS()), model=FLAT) as running:
        assert quoted(running, "prompt_tokens=4")["promised_ms"] == {"ttft": None, "tpot": None}


@pytest.mark.parametrize("chosen", OnInfeasible)
def test_a_quote_says_what_becomes_of_a_request_that_would_be_late(chosen: OnInfeasible) -> None:
    with live(Door(FCFS()), model=FLAT, on_infeasible=chosen) as running:
        for lengths in ("4", "4,5"):
            assert quoted(running, f"prompt_tokens={lengths}")["on_infeasible"] == chosen


@pytest.mark.parametrize(("said", "becomes"), [("true", "relegate"), ("False", "reject")])
def test_a_quote_may_ask_for_best_effort(server: Live, said: str, becomes: str) -> None:
    quote = quoted(server, f"prompt_tokens=100&slo_ttft_ms=4&slo_best_effort={said}")
    assert (quote["would_refuse"], quote["on_infeasible"]) == ("unkeepable", becomes)


def test_a_word_that_is_no_best_effort_is_named(server: Live) -> None:
    status, text = server.get("/v1/quote?prompt_tokens=100&slo_best_effort=yes")
    assert status == 400
    assert (
        json.loads(text)["error"]["message"] == "slo_best_effort must be true or false, not 'yes'"
    )


def test_one_question_may_name_several_lengths(server: Live) -> None:
    several = quoted(server, "prompt_tokens=20,100")
    assert several["object"] == "list"
    quotes = several["data"]
    assert isinstance(quotes, list)
    assert [quote["prompt_tokens"] for quote in quotes] == [20, 100]
    assert quotes[1]["alone_ms"] == quoted(server, "prompt_tokens=100")["alone_ms"]


@pytest.mark.parametrize(
    "query",
    [
        "",
        "prompt_tokens=",
        "prompt_tokens=0",
        "prompt_tokens=512",
        "prompt_tokens=" + "0" * 19 + "1" + "0" * 400,
        "prompt_tokens=1,,2",
        "prompt_tokens=" + ",".join("1" * 17),
    ],
)
def test_a_wrong_prompt_length_is_named(server: Live, query: str) -> None:
    status, text = server.get(f"/v1/quote?{query}")
    assert status == 400
    assert "prompt_tokens" in json.loads(text)["error"]["message"]


def test_a_policy_without_a_door_gives_no_quotes() -> None:
    with live(FCFS(), model=FLAT) as running:
        status, text = running.get("/v1/quote?prompt_tokens=4")
        assert status == 501
        assert "+door" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "promise", "expected_ms"),
    [({"slo_ttft_ms": 5}, "ttft", 5.2), ({"slo_tpot_ms": 4}, "tpot", 5.05)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_promise_that_cannot_be_kept_is_told_at_once(
    server: Live, asked: dict[str, float], promise: str, expected_ms: float, stream: bool
) -> None:
    status, document, headers = server.post(prompt="abcd", max_tokens=5, stream=stream, **asked)
    error = document["error"]
    assert (status, error["code"], error["reason"]) == (429, "slo_infeasible", "unkeepable")
    assert error["promise"] == promise
    assert error["expected_ms"] == pytest.approx(expected_ms)
    assert error["promised_ms"] == pytest.approx(next(iter(asked.values())))
    assert error["retry_after_ms"] is None
    assert "retry-after" not in headers
    assert "slo_best_effort" in error["message"]
    server.worker.begin_drain(5)
    assert server.worker.wait_stopped(5)
    assert server.worker.metrics.num_ended(EndReason.UNKEEPABLE) == 1


@pytest.mark.parametrize(
    ("asked", "promise", "expected_ms"),
    [({"slo_ttft_ms": 5}, "ttft", 5.2), ({"slo_tpot_ms": 4}, "tpot", 5.05)],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_with_a_prefix_cache_the_same_is_told_after_the_first_step(
    asked: dict[str, float], promise: str, expected_ms: float, overlap: bool
) -> None:
    """Only then it is known what is cached of the prompt."""
    cache = PrefixCaching.HASH
    door = Door(EDF())
    with live(
        door, model=FLAT, default_slo=KEEPABLE, prefix_cache=cache, overlap=overlap
    ) as running:
        status, document, headers = running.post(prompt="abcd", max_tokens=5, **asked)
    error = document["error"]
    assert (status, error["reason"], error["promise"]) == (429, "unkeepable", promise)
    assert error["expected_ms"] == pytest.approx(expected_ms)
    assert error["promised_ms"] == pytest.approx(next(iter(asked.values())))
    assert error["retry_after_ms"] is None
    assert "retry-after" not in headers
    assert "slo_best_effort" in error["message"]


def test_a_client_may_take_best_effort_instead(server: Live) -> None:
    body = {"prompt": "abcd", "max_tokens": 5, "slo_ttft_ms": 1, "slo_best_effort": True}
    status, document, headers = server.post(**body)
    assert (status, headers["x-slo-best-effort"]) == (200, "true")
    assert document["usage"]["completion_tokens"] == 5
    kept = server.post(prompt="abcd", max_tokens=5, slo_best_effort=True)
    assert (kept[0], "x-slo-best-effort" in kept[2]) == (200, False)


def test_a_client_learns_of_an_overload_while_the_device_is_still_busy(first_come: Live) -> None:
    """The device stands still; 400 tokens that wait take 25 ms and go before the new ones."""
    server, device = first_come, first_come.device
    device.gate.clear()
    prompts = [threading.Thread(target=server.post, kwargs={"prompt": "a" * 400})]
    prompts[0].start()
    assert device.entered.wait(10)
    prompts.append(threading.Thread(target=server.post, kwargs={"prompt": "b" * 400}))
    prompts[1].start()
    while quoted(server, "prompt_tokens=4&slo_ttft_ms=100")["ttft_ms"]["p50"] < 25:  # type: ignore[index]
        pass
    status, document, headers = server.post(prompt="abcd", slo_ttft_ms=8)
    device.gate.set()
    for thread in prompts:
        thread.join(10)
    error = document["error"]
    assert (status, error["reason"], error["promise"]) == (429, "overload", "ttft")
    assert error["expected_ms"] > error["promised_ms"]
    assert int(headers["retry-after"]) == error["retry_after_ms"] / 1000 == 5


def test_with_a_prefix_cache_a_refused_client_has_one_turn_to_come_again() -> None:
    """It had two, and those who were refused after it were told to come later than need be."""
    answers: list[Any] = []
    door = Door(FCFS())
    with live(door, model=FLAT, default_slo=KEEPABLE, prefix_cache=PrefixCaching.HASH) as running:
        running.device.gate.clear()
        bodies = (
            {"prompt": "a" * 400},
            {"prompt": "b" * 400},
            {"prompt": "abcd", "slo_ttft_ms": 8},
        )
        clients = []
        for num_sent, body in enumerate(bodies):
            ask = partial(lambda body: answers.append(running.post(**body)), body)
            clients.append(threading.Thread(target=ask))
            clients[-1].start()
            while running.worker.num_cut_short <= num_sent:  # it has come
                pass
            assert running.device.entered.wait(10)
        running.device.gate.set()
        for client in clients:
            client.join(10)
    [error] = [document["error"] for status, document, _ in answers if status == 429]
    assert (error["reason"], error["promise"]) == ("overload", "ttft")
    assert error["retry_after_ms"] == 5000


def test_a_group_rejected_in_its_midst_takes_one_turn_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four answers run at a time, and the others are late; each of them took a turn."""
    door = Door(EDF(drop=Drop.EXPIRED))
    settings: dict[str, Any] = {"model": FLAT, "device_model": FLAT, "default_slo": KEEPABLE}
    with live(door, limits=Limits(64, 4), **settings) as running:
        turns: list[Request] = []
        retry_after_s = running.worker.retry_after_s

        def noted(request: Request) -> float | None:
            turns.append(request)
            return retry_after_s(request)

        monkeypatch.setattr(running.worker, "retry_after_s", noted)
        promise = {"slo_ttft_ms": 600, "slo_tpot_ms": 5000}
        status, document, _ = running.post(prompt="b" * 60, max_tokens=60, n=64, **promise)
    assert (status, document["error"]["retry_after_ms"], len(turns)) == (429, 5000, 1)


def test_a_door_that_only_quotes_refuses_nothing() -> None:
    with live(Door(FCFS(), refuse=Refuse.NOTHING), model=FLAT) as running:
        assert running.post(prompt="abcd", max_tokens=2, slo_ttft_ms=0.1)[0] == 200
