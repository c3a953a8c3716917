"""What Ray Serve's request router does with replicas that come and go."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: pip install 'slosched[ray]'")

from ray.serve.request_router import PendingRequest

from slosched.gateway.config import GatewayConfig
from slosched.gateway.headers import sendable
from slosched.gateway.ray_serve.call import Call
from slosched.gateway.ray_serve.replica import URL
from slosched.gateway.ray_serve.request_router import FleetRouter

PENDING: Any = SimpleNamespace(args=[Call("POST", "/v1/completions", (), b'{"prompt": "a"}')])


def replica(name: str) -> Any:
    """Return a replica whose server nobody can reach."""
    return SimpleNamespace(replica_id=name, replica_metadata={URL: "http://127.0.0.1:1"})


@pytest.mark.filterwarnings("ignore")  # warnings from Ray itself
def test_a_replica_that_goes_while_a_request_waits_for_it_is_left_out() -> None:
    """Ray Serve logs what is raised here, and the request waits for ever."""
    stays, goes = replica("stays"), replica("goes")

    async def play() -> list[list[Any]]:
        router: Any = FleetRouter.__new__(FleetRouter)
        router.initialize_state("round_robin")
        router._config = GatewayConfig(poll_timeout_s=0.5)
        router._replicas = {each.replica_id: each for each in (stays, goes)}
        first = asyncio.create_task(router.choose_replicas([stays, goes], PENDING))
        await asyncio.sleep(0.1)
        del router._replicas[goes.replica_id]
        others = await router.choose_replicas([stays], PENDING)
        assert others == [[stays]]
        try:
            return await first
        finally:
            for watched in router._watched.values():
                watched.task.cancel()
            await router._session.close()

    assert asyncio.run(play()) == [[stays, goes]]


@pytest.mark.filterwarnings("ignore")  # warnings from Ray itself
def test_headers_in_any_language_are_read() -> None:
    """Ray Serve logs what is raised here, and the request waits for ever."""
    headers = sendable([(b"x-title", "日本語".encode()), (b"x-slo-ttft-ms", b"250")])
    router: Any = FleetRouter.__new__(FleetRouter)
    router.initialize_state("round_robin")
    router._fleet.add("http://127.0.0.1:1")
    asked = router._read(Call("POST", "/v1/completions", headers, b'{"prompt": "a"}'))
    assert asked.slo.ttft_s == 0.25


@pytest.mark.filterwarnings("ignore")  # warnings from Ray itself
def test_a_header_may_have_any_characters() -> None:
    """What is raised in the router is only logged, and the request waits for ever."""
    headers = (("x-title", "中文"), ("x-llm-d-slo-ttft-ms", "1500"))
    router: Any = FleetRouter.__new__(FleetRouter)
    router.initialize_state("round_robin")
    router._fleet.add("http://127.0.0.1:1")
    asked = router._read(Call("POST", "/v1/completions", headers, b'{"prompt": "a"}'))
    assert asked.slo.ttft_s == 1.5


def pending(name: str) -> Any:
    metadata: Any = SimpleNamespace(internal_request_id=name)
    return PendingRequest(PENDING.args, {}, metadata)


@pytest.mark.filterwarnings("ignore")  # warnings from Ray itself
def test_requests_that_come_at_once_are_spread() -> None:
    """Each is chosen a replica before any of them is sent; clients may go before that, too."""
    first, second = replica("first"), replica("second")

    async def play() -> None:
        router: Any = FleetRouter.__new__(FleetRouter)
        router.initialize_state("least_requests")
        router._config = GatewayConfig(poll_timeout_s=0.1)
        router._replicas = {each.replica_id: each for each in (first, second)}
        await router._watch([first, second])
        views = [router._watched[each.replica_id].view for each in (first, second)]
        for watched in router._watched.values():
            watched.task.cancel()
            watched.view.mark_up()

        burst = [pending(str(number)) for number in range(4)]
        chosen = [(await router.choose_replicas([first, second], each))[0][0] for each in burst]
        assert chosen == [first, second, first, second]
        for each, its in zip(burst[:3], chosen, strict=False):
            router.on_request_routed(each, its.replica_id, None)
        assert [view.num_in_flight for view in views] == [2, 2]
        del each
        burst.clear()  # the client of the last one goes before it is sent
        assert [view.num_in_flight for view in views] == [2, 1]
        for number in range(3):
            router.on_request_completed("", str(number))
        assert [view.num_in_flight for view in views] == [0, 0]
        await router._session.close()

    asyncio.run(play())
