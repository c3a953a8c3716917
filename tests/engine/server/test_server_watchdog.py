"""A device that hangs makes the server unhealthy, for as long as it hangs.

The device really blocks, and the server is a real one.  Only the engine's clock is the test's, so
that no step takes too long by accident.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from live_server import MODEL, Live, live

from slosched.core import Policy, SchedulerOutput, SchedulerView
from slosched.engine.server import StepLimit
from slosched.policy import FCFS

PATIENCE_S = 30.0


@dataclass
class Hands:
    """A clock that stands still until the test moves it."""

    time_s: float = 1000.0

    def now_s(self) -> float:
        return self.time_s


@pytest.fixture
def hands() -> Hands:
    return Hands()


@contextmanager
def warm(hands: Hands, policy: Policy | None = None, **options: Any) -> Iterator[Live]:
    """Yield a server that has its first steps behind it."""
    with live(policy, clock=hands, **options) as server:
        assert server.post(prompt="x", max_tokens=2 * StepLimit().num_warmup_steps)[0] == 200
        yield server


@contextmanager
def hanging(server: Live) -> Iterator[Callable[[], tuple[int, Any, Any]]]:
    """Yield a function that returns the answer to a request whose first step blocks in the device."""
    server.device.entered.clear()
    server.device.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, prompt="abc", max_tokens=3)
        try:
            assert server.device.entered.wait(PATIENCE_S)
            yield answer.result
        finally:
            server.device.gate.set()


def health(server: Live) -> tuple[int, Any]:
    status, text = server.get("/health")
    return status, json.loads(text)


def metric(server: Live, name: str) -> float:
    (value,) = re.findall(rf'^slosched:{name}{{model_name="{MODEL}"}} (\S+)$', *page(server))
    return float(value)


def page(server: Live) -> tuple[str, re.RegexFlag]:
    return server.get("/metrics")[1], re.MULTILINE


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.name.endswith("watchdog")]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_device_that_hangs_is_a_503_until_it_goes_on(
    hands: Hands, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with warm(hands, overlap=overlap) as server:
        with hanging(server) as answer:
            hands.time_s += 9.9
            assert health(server) == (200, {"status": "ok"})
            assert metric(server, "step_is_hung") == 0
            hands.time_s += 2.6
            status, body = health(server)
            assert (status, body["status"]) == (503, "hung")
            assert body["step"] == pytest.approx(
                {"running_s": 12.5, "predicted_s": 1e-4, "limit_s": 10.0}
            )
            assert "the device has not ended a step for 12.5 s" in body["reason"]
            assert "requests in the step: 1, prefill tokens: 3, decodes: 0" in body["reason"]
            assert metric(server, "step_is_hung") == metric(server, "steps_hung_total") == 1
            hands.time_s += 1
            assert health(server)[1]["step"]["running_s"] == pytest.approx(13.5)
            server.device.gate.set()
            assert answer()[1]["choices"][0]["text"] == "abc"
        assert health(server) == (200, {"status": "ok"})
        assert metric(server, "step_is_hung") == 0
        assert metric(server, "steps_hung_total") == 1
        assert said(caplog) == [
            f"hung: {body['reason']}",
            "no longer hung: the step that hung ended after 13.5 s",
        ]


def test_new_requests_are_refused_while_a_step_hangs(hands: Hands) -> None:
    with warm(hands) as server:
        with hanging(server) as answer:
            hands.time_s += 11
            status, document, headers = server.post(prompt="abc")
            assert (status, document["error"]["code"]) == (503, "not_serving")
            assert "the device has not ended a step" in document["error"]["message"]
            assert headers["retry-after"] == "1"
            server.device.gate.set()
            assert answer()[0] == 200
        assert server.post(prompt="abc", max_tokens=3)[0] == 200


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_hangs_for_long_is_given_up_and_all_requests_fail(
    hands: Hands, overlap: bool
) -> None:
    """One request is in the step that hangs, and another has not reached the scheduler."""
    with warm(hands, overlap=overlap) as server, ThreadPoolExecutor(1) as pool:
        with hanging(server) as answer:
            waiting = pool.submit(server.post, prompt="xyz", max_tokens=3)
            wait_until(lambda: server.worker.num_cut_short == 2)
            hands.time_s += 69
            assert health(server)[1]["status"] == "hung"
            assert not waiting.done()
            hands.time_s += 2
            for status, document, _ in (answer(), waiting.result()):
                assert (status, document["error"]["code"]) == (500, "engine_fault")
                assert "a step was given up" in document["error"]["message"]
            assert server.worker.wait_stopped(PATIENCE_S)
            assert "a step was given up" in str(server.worker.why_broken)
            assert server.worker.why_refusing == server.worker.why_broken
        server.device.released.get(timeout=PATIENCE_S)  # the blocks are free when the step ends


def test_a_drain_ends_on_time_if_it_is_known_that_a_step_hangs(hands: Hands) -> None:
    with warm(hands) as server:
        with hanging(server) as answer:
            server.worker.begin_drain(20)
            hands.time_s += 19
            server.worker.give_up_hung_drain(1000)
            assert not server.worker.has_stopped
            hands.time_s += 2
            server.worker.give_up_hung_drain(1000)
            assert server.worker.has_stopped
            assert "hung at the end of the drain" in answer()[1]["error"]["message"]
        server.device.released.get(timeout=PATIENCE_S)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)


def test_without_a_latency_model_there_is_a_limit_too(hands: Hands) -> None:
    with warm(hands, model=None) as server, hanging(server):
        hands.time_s += 9.9
        assert health(server)[0] == 200
        hands.time_s += 0.2
        status, body = health(server)
        assert (status, body["step"]["predicted_s"]) == (503, None)
        assert "for 10.1 s; nothing was predicted and 10 s are allowed" in body["reason"]


def test_the_log_tells_of_a_hang_that_nobody_asks_about(hands: Hands) -> None:
    told = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda _record: told.set()  # type: ignore[method-assign]
    logger = logging.getLogger("slosched.engine.server.watchdog")
    logger.addHandler(handler)
    try:
        with warm(hands) as server, hanging(server):
            hands.time_s += 11
            assert told.wait(PATIENCE_S)
    finally:
        logger.removeHandler(handler)


def test_a_step_that_fails_after_it_hung_makes_the_server_healthy_again(hands: Hands) -> None:
    with warm(hands) as server:
        with hanging(server) as answer:
            hands.time_s += 11
            assert health(server)[0] == 503
            server.device.fault = RuntimeError("the driver was reset")
            server.device.gate.set()
            assert answer()[0] == 500
        server.device.fault = None
        assert health(server)[0] == 200


def test_the_first_steps_have_longer(hands: Hands) -> None:
    with live(clock=hands) as server, hanging(server):
        hands.time_s += 299
        assert health(server)[0] == 200
        hands.time_s += 2
        assert health(server)[0] == 503


def test_nothing_hangs_while_there_is_nothing_to_do(hands: Hands) -> None:
    with warm(hands) as server:
        hands.time_s += 3600
        assert health(server)[0] == 200
        assert server.post(prompt="x", max_tokens=3)[0] == 200
        assert metric(server, "steps_hung_total") == 0


@dataclass
class Pensive(Policy):
    """FCFS that takes its time to plan until it may go on."""

    begun: threading.Event
    may_go_on: threading.Event

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        self.begun.set()
        assert self.may_go_on.wait(PATIENCE_S)
        return FCFS().schedule(view)


def test_a_policy_that_hangs_is_told_from_the_device(hands: Hands) -> None:
    policy = Pensive(threading.Event(), threading.Event())
    policy.may_go_on.set()
    with warm(hands, policy) as server, ThreadPoolExecutor(1) as pool:
        policy.may_go_on.clear()
        policy.begun.clear()
        answer = pool.submit(server.post, prompt="abc", max_tokens=3)
        assert policy.begun.wait(PATIENCE_S)
        hands.time_s += 11
        status, body = health(server)
        policy.may_go_on.set()
        assert status == 503
        assert "a step has been planned or booked for 11.0 s" in body["reason"]
        assert body["step"]["predicted_s"] is None
        assert answer.result()[0] == 200
        assert health(server)[0] == 200


@pytest.mark.parametrize(
    ("predicted_s", "num_ended", "limit_s"),
    [
        (None, 8, 10.0),
        (0.4, 8, 10.0),
        (0.6, 8, 12.0),
        (None, 7, 300.0),
        (20.0, 0, 400.0),
    ],
)
def test_how_long_a_step_may_take(
    predicted_s: float | None, num_ended: int, limit_s: float
) -> None:
    assert StepLimit().of_step(predicted_s, num_ended) == pytest.approx(limit_s)


def test_a_limit_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"timeout_s must be positive, not -1"):
        StepLimit(-1)
