"""The page at /: whether the server sends it, and whether what it reads is there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import aiohttp
import pytest
from live_server import MODEL, Live, live, with_client

from slosched.core import DeadlineRule, Limits
from slosched.workload.service_tier import ServiceTier


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    limits = Limits(deadline_rule=DeadlineRule.TBT)
    with live(limits=limits, tiers=(ServiceTier("gold"),), tenants={"secret": "acme"}) as running:
        yield running


@pytest.fixture(scope="module")
def page(server: Live) -> str:
    status, text = server.get("/")
    assert status == 200, "the page itself needs no API key, since it is where one is typed in"
    return text


def test_it_is_html_that_may_load_nothing_from_elsewhere(server: Live, page: str) -> None:
    async def headers(client: aiohttp.ClientSession) -> tuple[str, str]:
        async with client.get("/") as response:
            return response.content_type, response.headers["content-security-policy"]

    kind, allowed = asyncio.run(with_client(server.url, headers))
    assert kind == "text/html"
    assert "default-src 'none'" in allowed
    assert "connect-src 'self'" in allowed
    assert not re.search(r"https?://|\b(src|href)=|@import|url\(", page)


def test_every_metric_that_it_reads_is_served(server: Live, page: str) -> None:
    names = set(re.findall(r'"((?:vllm|slosched):\w+|process_\w+)"', page))
    assert len(names) >= 11
    metrics = server.get("/metrics")[1]
    assert {name for name in names if f"\n{name}" not in metrics} == set()
    assert f'slosched:deadline_rule_info{{model_name="{MODEL}",rule="tbt"}} 1' in metrics


def test_every_element_that_its_script_looks_up_is_there(page: str) -> None:
    looked_up = set(re.findall(r'element\("(\w+)"\)', page))
    assert looked_up
    assert looked_up <= set(re.findall(r'\bid="(\w+)"', page))


def test_its_request_streams_tokens_if_it_has_the_key(server: Live, page: str) -> None:
    fields = re.search(r"const body = \{(.*?)\};", page, re.DOTALL)
    assert fields is not None
    names = re.findall(r"(\w+): ", fields[1])
    given = {"prompt": "abc", "max_tokens": 3, "stream": False, "slo_ttft_ms": 9e3}
    body = {**given, "slo_tpot_ms": 9e3}
    assert set(names) == set(body)
    assert server.post(**body)[0] == 401
    status, answer, _ = server.post(**body, headers={"authorization": "Bearer secret"})
    assert (status, answer["choices"][0]["text"]) == (200, "abc")
