"""What a router makes of answers about a replica's state that are not as they should be."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Collection, Mapping

import aiohttp
import pytest
from aiohttp import web
from live_server import live

from slosched.core import SLO, Request
from slosched.gateway.answers import MOST_STATE_BYTES
from slosched.gateway.config import GatewayConfig
from slosched.gateway.fleet import LiveFleet
from slosched.gateway.forecast import Forecast
from slosched.gateway.gateway import Gateway

MODELS = '{"object": "list", "data": [{"id": "fragile"}]}'
DEEP = "[" * 100_000
_QUOTE = {
    "prompt_tokens": 16,
    "ttft_ms": {"p10": 1.0, "p50": 1.0},
    "tpot_ms": {"p50": 1.0},
    "alone_ms": {"ttft": 1.0, "tpot": 1.0},
    "promised_ms": {"ttft": None, "tpot": None},
    "num_requests_running": 0,
    "num_requests_waiting": 0,
}


def quotes(*changes: Mapping[str, object]) -> str:
    data = [{**_QUOTE, **change} for change in changes]
    return json.dumps({"object": "list", "data": data}).replace("Infinity", "1e999")


async def why_down_if(answer: Callable[[web.Request], Awaitable[web.Response]]) -> str:
    """Return why a server is down that answers every request so; an empty text if it is up."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway = Gateway([f"http://127.0.0.1:{runner.addresses[0][1]}"], "least_requests")
    try:
        await gateway.start()
        await gateway.stop()
        return gateway.fleet.replicas[0].why_down
    finally:
        await runner.cleanup()


async def why_down(pages: Mapping[str, str]) -> str:
    """Return why a server with these pages is down; an empty text if it is up.

    The server answers "Not Found" to all else, as Starlette does.
    """

    async def answer(request: web.Request) -> web.Response:
        text = {"/v1/models": MODELS, **pages}.get(request.path)
        return web.Response(text=text or "Not Found", status=404 if text is None else 200)

    return await why_down_if(answer)


@pytest.mark.parametrize(
    "pages",
    [
        {},
        {"/metrics": "This server has no metrics."},
        {"/metrics": "vllm:num_requests_running NaN\nvllm:num_requests_waiting 1\n"},
        {"/metrics": "vllm:num_requests_running +Inf\nvllm:num_requests_waiting 1\n"},
        {"/load": '{"num_requests_running": 1e999, "num_requests_waiting": 0}'},
        {"/load": DEEP},
        {"/tokenize": '{"count": 1e999}'},
        {"/tokenize": DEEP},
        {"/v1/quote": DEEP},
        {"/v1/quote": quotes({"prompt_tokens": float("inf")})},
    ],
)
def test_a_server_whose_state_cannot_be_read_is_routed_to_without_it(
    pages: Mapping[str, str],
) -> None:
    assert asyncio.run(why_down(pages)) == ""


@pytest.mark.parametrize("path", ["/v1/models", "/metrics"])
def test_a_server_whose_state_is_too_long_to_be_read_is_down(path: str) -> None:
    assert asyncio.run(why_down({path: "x" * (MOST_STATE_BYTES + 1)})) == (
        f"it sends more than {MOST_STATE_BYTES} bytes"
    )


async def why_down_of_redirecting(paths: Collection[str]) -> tuple[str, list[str]]:
    """Return why a server is down that redirects `paths`, and what came where it redirects to.

    All would be well there.
    """
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path in paths:
            return web.Response(status=307, headers={"location": f"/elsewhere{request.path}"})
        if request.path.startswith("/elsewhere"):
            asked.append(request.path)
        return web.Response(text=MODELS)

    return await why_down_if(answer), asked


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_server_that_redirects_the_router_is_down(path: str) -> None:
    why, asked = asyncio.run(why_down_of_redirecting({path}))
    assert why.startswith(f"{path} answers 307")
    assert asked == []


def test_a_page_of_a_servers_state_that_is_elsewhere_is_none() -> None:
    paths = {"/tokenize", "/v1/quote", "/load", "/metrics"}
    assert asyncio.run(why_down_of_redirecting(paths)) == ("", [])


@pytest.mark.parametrize("models", [DEEP, '{"data": [{"id": "fragile"}, {"object": "model"}]}'])
def test_a_server_whose_models_cannot_be_read_is_down(models: str) -> None:
    said = asyncio.run(why_down({"/v1/models": models}))
    assert said == "/v1/models is not an OpenAI-compatible answer"


@pytest.mark.parametrize(
    "changes",
    [
        [{"prompt_tokens": 0}],
        [{"prompt_tokens": 16}, {"prompt_tokens": 16}],
        [{"prompt_tokens": 64}, {"prompt_tokens": 16}],
        [{"alone_ms": {"ttft": -1.0, "tpot": 1.0}}],
        [{"ttft_ms": {"p10": 1.0, "p50": float("inf")}}],
        [{"tpot_ms": {"p50": float("nan")}}],
    ],
)
def test_quotes_that_no_router_can_reckon_with_are_none(
    changes: list[Mapping[str, object]],
) -> None:
    data = [{**_QUOTE, **change} for change in changes]
    with pytest.raises(ValueError, match=r"positive lengths that rise|finite and not negative"):
        Forecast.of({"object": "list", "data": data})


def test_a_server_that_asks_for_a_key_is_told_plainly() -> None:
    async def why_not_in(api_key: str | None) -> str:
        config = GatewayConfig(api_key=api_key)
        gateway = Gateway([server.url], "least_requests", config)
        await gateway.start()
        await gateway.stop()
        return gateway.fleet.replicas[0].why_down

    with live(api_keys=("secret",)) as server:
        assert asyncio.run(why_not_in(None)) == (
            "it asks for a key (HTTP 401): give it with --api-key or in SLOSCHED_API_KEY"
        )
        assert "asks for another key" in asyncio.run(why_not_in("guessed"))
        assert asyncio.run(why_not_in("secret")) == ""


@pytest.mark.parametrize(("says", "is_told"), [("its default", False), (400, False), ("it", True)])
def test_a_server_is_up_whatever_it_says_of_a_ttft_that_a_client_asked_for(
    says: str | int, is_told: bool
) -> None:
    async def quote(request: web.Request) -> web.Response:
        asked = request.query.get("slo_ttft_ms")
        if asked and isinstance(says, int):
            return web.Response(status=says)
        ttft_ms = float(asked) if asked and says == "it" else 2000.0
        promised = {"promised_ms": {"ttft": ttft_ms, "tpot": None}}
        late = {"ttft_ms": {"p10": 700.0, "p50": 900.0}, "num_requests_running": 1}
        return web.Response(text=quotes({**promised, **late}))

    async def models(_request: web.Request) -> web.Response:
        return web.Response(text=MODELS)

    async def least_s() -> float:
        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.get("/v1/quote", quote)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        fleet = LiveFleet([url], "predicted_ttft", GatewayConfig())
        async with aiohttp.ClientSession() as session:
            watch = fleet.watch(fleet.replicas[0], session)
            await watch.look()
            asked = Request("", 0.0, 16, max_tokens=1, slo=SLO(0.3333, math.inf))
            fleet.choose(asked, fleet.up)
            await watch.look()
        await runner.cleanup()
        return fleet.least_ttft_s(asked, fleet.up)

    assert asyncio.run(least_s()) == pytest.approx(0.7 if is_told else 0.001, abs=0.1)
