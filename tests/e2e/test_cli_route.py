"""`slosched route` in front of real servers, each in a process of its own."""

from __future__ import annotations

import json
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import Any, NamedTuple

import pytest
from command_line import Said, Server, parse_events, routing, serving
from live_server import live

from slosched.policy import FCFS, Door

pytestmark = pytest.mark.e2e

GPU = "l40s/llama-3.1-8b"
REPLICA = ("--emulate", GPU)
LONG = {"prompt": "the device repeats this text", "max_tokens": 100, "ignore_eos": True}
"""A request that takes more than two seconds."""
_PATIENCE_S = 30.0
Cli = Callable[..., Said]


class Front(NamedTuple):
    """A router, and the two servers behind it."""

    router: Server
    replicas: tuple[Server, Server]

    def ended(self, end: str) -> float:
        return self.router.metric("slosched:route_requests_ended_total", f'end="{end}"')

    def count(self, name: str, replica: Server) -> float:
        return self.router.metric(f"slosched:route_{name}", f'replica="{replica.url}"')


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_s, "waited in vain"
        time.sleep(0.02)


def opened(server: Server, **body: Any) -> HTTPResponse:
    """Return a stream whose first event has not been read; the caller closes it."""
    data = json.dumps({**body, "stream": True}).encode()
    answer = urllib.request.urlopen(
        urllib.request.Request(server.url + "/v1/completions", data=data), timeout=_PATIENCE_S
    )
    assert isinstance(answer, HTTPResponse)
    return answer


def running(replica: Server) -> float:
    return replica.metric("vllm:num_requests_running") + replica.metric("vllm:num_requests_waiting")


@pytest.fixture(scope="module")
def replicas() -> Iterator[tuple[Server, Server]]:
    with serving(*REPLICA) as first, serving(*REPLICA) as second:
        yield first, second


@pytest.fixture(scope="module")
def front(replicas: tuple[Server, Server]) -> Iterator[Front]:
    with routing([each.url for each in replicas]) as router:
        yield Front(router, replicas)


def test_an_answer_is_that_of_the_replica(front: Front) -> None:
    asked = {"prompt": "Once upon a time", "max_tokens": 8}
    status, answer = front.router.post(**asked)
    direct = front.replicas[0].post(**asked)[1]
    assert status == 200
    assert answer["choices"] == direct["choices"]
    assert answer["usage"] == direct["usage"]
    messages = [{"role": "user", "content": "hello"}]
    chat = front.router.post("/v1/chat/completions", messages=messages, max_tokens=4)[1]
    assert chat["object"] == "chat.completion"
    assert front.router.stream(**asked)[-1]["choices"][0]["finish_reason"] == "length"


def test_a_stream_is_passed_on_as_it_comes(front: Front) -> None:
    with opened(front.router, **LONG) as stream:
        assert stream.readline().startswith(b"data: ")
        assert sum(map(running, front.replicas)) == 1
        assert stream.read().endswith(b"data: [DONE]\n\n")


def test_least_requests_spreads_what_runs_at_once(front: Front) -> None:
    with opened(front.router, **LONG), opened(front.router, **LONG):
        assert [front.count("in_flight", each) for each in front.replicas] == [1, 1]
        assert [running(each) for each in front.replicas] == [1, 1]


def test_a_client_that_goes_away_ends_its_request_on_the_replica(front: Front) -> None:
    gone = front.ended("client_gone")
    stream = opened(front.router, **LONG)
    stream.readline()
    assert sum(map(running, front.replicas)) >= 1
    stream.close()
    wait_until(lambda: sum(map(running, front.replicas)) == 0)
    wait_until(lambda: front.ended("client_gone") > gone)


def test_ids_and_errors_are_those_of_the_replica(front: Front) -> None:
    request = urllib.request.Request(
        front.router.url + "/v1/completions",
        data=b'{"prompt": "a", "max_tokens": 1}',
        headers={"x-request-id": "my-own-id"},
    )
    with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
        assert answer.headers.get_all("x-request-id") == ["my-own-id"]
    status, error = front.router.post(prompt="a", max_tokens=0)
    assert (status, error) == front.replicas[0].post(prompt="a", max_tokens=0)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b'{"prompt": "a", "slo_ttft_ms": -1}', 400, "slo_ttft_ms"),
        (b'{"prompt": "a", "slo_tfft_ms": 1}', 400, "there is no promise 'slo_tfft_ms'"),
        (b'{"prompt": "a", "model": "gpt-6"}', 404, "no replica has a model 'gpt-6'"),
        (b" " * 10_000_000, 413, "more than"),
    ],
)
def test_what_the_router_cannot_read_it_refuses(
    front: Front, body: bytes, status: int, message: str
) -> None:
    found, text = front.router.post_raw(body)
    assert found == status
    assert message in json.loads(text)["error"]["message"]


def test_top_of_a_router_asks_for_a_server(front: Front, cli: Cli) -> None:
    said = cli("top", front.router.url, "--once")
    assert said.status == 1
    assert "is of a router" in said.err
    assert "name one of its servers" in said.err


def test_models_are_those_of_the_replicas(front: Front) -> None:
    models = json.loads(front.router.get("/v1/models")[1])["data"]
    assert [model["id"] for model in models] == [GPU]
    assert models[0]["max_model_len"] > 1000
    assert front.router.get(f"/v1/models/{GPU}")[0] == 200
    assert front.router.get("/v1/models/other")[0] == 404


def test_what_every_replica_would_be_late_with_is_refused_at_once(front: Front) -> None:
    sent = [front.count("requests_total", each) for each in front.replicas]
    status, error = front.router.post(prompt="a" * 500, max_tokens=4, slo_ttft_ms=0.01)
    assert status == 429
    assert error["error"]["code"] == "slo_infeasible"
    assert error["error"]["promised_ms"] == 0.01
    assert (error["error"]["reason"], error["error"]["retry_after_ms"]) == ("unkeepable", None)
    assert front.ended("shed") >= 1
    assert [front.count("requests_total", each) for each in front.replicas] == sent
    status, _ = front.router.post(
        prompt="a" * 500, max_tokens=4, slo_ttft_ms=0.01, slo_best_effort=True
    )
    assert status == 200


def test_what_the_servers_serve_late_is_not_refused_by_the_router() -> None:
    late = {"prompt": "a", "max_tokens": 4, "slo_ttft_ms": 0.01}
    hasty = {"prompt": "a", "max_tokens": 4, "service_tier": "hasty"}
    options = ("--on-infeasible", "serve", "--tier", "hasty=ttft:0.01ms,on-infeasible:reject")
    with serving(*REPLICA, *options) as server, routing([server.url]) as router:
        assert router.post(**late)[0] == 200
        assert router.post(**late, on_infeasible="reject")[0] == 429
        shed = "slosched:route_requests_ended_total", 'end="shed"'
        before = router.metric(*shed)
        assert router.post(**hasty)[0] == 429  # by the server; the router asks what it promises
        wait_until(lambda: router.post(**hasty)[0] == 429 and router.metric(*shed) > before)
        assert router.post(**hasty, on_infeasible="serve")[0] == 200
        assert router.post(prompt="a", max_tokens=4, service_tier="brass")[0] == 400


def test_a_request_that_overtakes_all_that_wait_is_not_refused_for_them() -> None:
    """Those that wait have two minutes, and the server goes by deadlines."""
    patient = ("--policy", "edf+door", "--slo-ttft", "120s", "--slo-tpot", "1s")
    with (
        serving(*REPLICA, *patient) as server,
        routing([server.url]) as router,
        ThreadPoolExecutor(12) as pool,
    ):
        crowd = [pool.submit(server.post, prompt="a" * 4500, max_tokens=2) for _ in range(12)]
        wait_until(lambda: running(server) == 12)
        for _ in range(2):  # the second time there are quotes for this TTFT
            assert router.post(prompt="a" * 4000, max_tokens=2, slo_ttft_ms=1500)[0] == 200
            time.sleep(0.3)
        assert {each.result()[0] for each in crowd} == {200}


def test_a_refusal_is_asked_for_at_the_other_replica_and_then_passed_on(front: Front) -> None:
    """No replica keeps this TPOT, which the router does not judge."""
    sent = [front.count("requests_total", each) for each in front.replicas]
    status, error = front.router.post(prompt="a", max_tokens=4, slo_tpot_ms=0.01)
    assert status == 429
    assert error["error"]["reason"] == "unkeepable"
    moved = [front.count("requests_total", each) for each in front.replicas]
    assert [after - before for after, before in zip(moved, sent, strict=True)] == [1, 1]


def test_each_of_many_requests_is_answered_once(front: Front) -> None:
    ends = ("answered", "refused", "shed", "failed")
    before = {end: front.ended(end) for end in ends}
    finished = sum(
        r.metric("vllm:request_success_total", 'reason="length"') for r in front.replicas
    )

    def ask(i: int) -> int:
        slo = {"slo_ttft_ms": 300} if i % 3 else {"slo_best_effort": True}
        return front.router.post(prompt="a" * (1 + 40 * i), max_tokens=1 + i % 7, **slo)[0]

    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(ask, range(60)))
    assert set(statuses) <= {200, 429}
    after = {end: front.ended(end) - before[end] for end in ends}
    assert after["answered"] == statuses.count(200) > 20
    assert after["refused"] + after["shed"] == statuses.count(429)
    assert after["failed"] == 0
    now = sum(r.metric("vllm:request_success_total", 'reason="length"') for r in front.replicas)
    assert now - finished == statuses.count(200)


def test_a_replica_that_dies_in_a_stream_ends_it_with_an_error_and_others_serve(
    replicas: tuple[Server, Server],
) -> None:
    stays = replicas[0]
    with serving(*REPLICA) as dies, routing([dies.url, stays.url]) as router:
        front = Front(router, (dies, stays))
        with opened(router, **LONG) as broken:  # least_requests takes the first of two equals
            broken.readline()
            assert front.count("in_flight", dies) == 1
            dies.process.kill()
            text = broken.read().decode()
        error = json.loads(text.split("\n\n")[-3].strip().removeprefix("data: "))["error"]
        assert error["code"] == "replica_failed"
        assert text.endswith("data: [DONE]\n\n")
        assert front.count("requests_total", stays) == 0  # it is not answered twice
        statuses = [router.post(prompt="a", max_tokens=2)[0] for _ in range(5)]
        assert statuses == [200] * 5
        assert "down" in json.loads(router.get("/health")[1])["replicas"][dies.url]


def test_without_any_replica_there_is_a_clear_error_until_one_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with routing([url]) as router:
        status, error = router.post(prompt="a", max_tokens=2)
        assert (status, error["error"]["code"]) == (503, "no_replica")
        assert url in error["error"]["message"]
        assert router.get("/health")[0] == 503
        with live(port=port):
            wait_until(lambda: router.get("/health")[0] == 200)
            assert router.post(prompt="a", max_tokens=2)[0] == 200


def test_a_replica_that_hangs_does_not_hold_up_others(replicas: tuple[Server, Server]) -> None:
    hangs = replicas[0]
    with routing([each.url for each in replicas]) as router, ThreadPoolExecutor(1) as pool:
        front = Front(router, replicas)
        hangs.process.send_signal(signal.SIGSTOP)
        try:
            held = pool.submit(router.post, prompt="a", max_tokens=2)
            wait_until(lambda: front.count("in_flight", hangs) == 1)
            assert [router.post(prompt="a", max_tokens=2)[0] for _ in range(3)] == [200] * 3
            assert not held.done()
        finally:
            hangs.process.send_signal(signal.SIGCONT)
        assert held.result(timeout=_PATIENCE_S)[0] == 200


def test_a_drain_lets_streams_finish_and_refuses_new_requests(
    replicas: tuple[Server, Server],
) -> None:
    with routing([each.url for each in replicas]) as router:
        with opened(router, **LONG) as stream:
            stream.readline()
            router.process.send_signal(signal.SIGTERM)
            wait_until(lambda: router.get("/health")[0] == 503)
            status, error = router.post(prompt="a", max_tokens=1)
            assert (status, error["error"]["code"]) == (503, "not_serving")
            rest = stream.read().decode()
        assert parse_events(rest.lstrip())[-1]["choices"][0]["finish_reason"] == "length"
        status, said = router.wait()
        assert status == 0
        assert "every request has had its answer" in said


def test_what_outlasts_the_drain_ends_with_an_error(replicas: tuple[Server, Server]) -> None:
    with routing([each.url for each in replicas], "--drain-timeout", "100ms") as router:
        with opened(router, **LONG) as stream:
            stream.readline()
            router.process.send_signal(signal.SIGTERM)
            events = parse_events(stream.read().decode().lstrip())
        assert events[-1]["error"]["code"] == "shutdown"
        assert "cut short, each with an error message: 1" in router.wait()[1]
    wait_until(lambda: sum(map(running, replicas)) == 0)


def test_keys_of_clients_and_of_the_router() -> None:
    with live(Door(FCFS()), api_keys=("secret",)) as replica:
        options = ("--router", "predicted_ttft", "--api-key", "secret")
        with routing([replica.url], *options) as router:
            body = b'{"prompt": "a", "max_tokens": 1}'
            assert router.post_raw(body)[0] == 401
            key = {"authorization": "Bearer secret"}
            assert router.post_raw(body, headers=key)[0] == 200


def test_a_request_may_take_no_longer_than_the_operator_lets_it(
    replicas: tuple[Server, Server],
) -> None:
    with routing([replicas[0].url], "--request-timeout", "500ms") as router:
        status, error = router.post(**LONG)
        assert (status, error["error"]["code"]) == (504, "request_timeout")
        assert router.stream(**LONG)[-1]["error"]["code"] == "request_timeout"
    wait_until(lambda: sum(map(running, replicas)) == 0)


def test_a_server_without_quotes_serves_routers_that_need_none(cli: Cli) -> None:
    with live(FCFS()) as plain:
        said = cli("route", "--url", plain.url, "--router", "predicted_ttft", "--port", "0")
        assert said.status == 1
        assert "the router predicted_ttft needs quotes" in said.complaint
        assert "take least_requests" in said.complaint
        with routing([plain.url]) as router:
            assert router.post(prompt="abc", max_tokens=2)[0] == 200
            plain.device.gate.clear()
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(plain.post, prompt="of another client", max_tokens=2)
                name = "slosched:route_replica_requests"
                wait_until(lambda: router.metric(name, f'replica="{plain.url}"') == 1)
                plain.device.gate.set()
                assert other.result(timeout=_PATIENCE_S)[0] == 200


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--url", "a:8000"], "'a:8000' is no address of a server; write http://"),
        (["--url", "http://a:8000/v1"], "leave out /v1"),
        (["--url", "http://a:1", "--url", "http://a:1/"], "http://a:1 is named twice"),
        (["--url", "http://a:1", "--router", "robin"], "no router 'robin'"),
    ],
)
def test_wrong_options_are_named(cli: Cli, arguments: list[str], complaint: str) -> None:
    said = cli("route", *arguments)
    assert said.status == 1
    assert complaint in said.complaint
