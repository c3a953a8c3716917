"""The page at / in a real browser: what it shows of a server with tiers and tenants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser, browser, show_as, wait_until
from live_server import Live, live
from selenium.webdriver.common.by import By

from slosched.core import SLO
from slosched.workload.service_tier import ServiceTier

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TIERS = (ServiceTier("gold", SLO(20.0, 20.0)), ServiceTier("batch", SLO(1e-6, 20.0)))
"""An SLO that is kept, and one that is not."""
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(tiers=TIERS, tenants={"secret": "acme", "other": "idle"}) as running:
        yield running


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def page(server: Live, opened: Browser) -> Browser:
    """The page after its first look at the metrics."""
    opened.get(server.url)
    wait_until(opened, lambda _: len(legends(opened)) > 0)
    return opened


def legends(opened: Browser) -> list[str]:
    return [span.text for span in opened.find_elements(By.CSS_SELECTOR, "figcaption span")]


def text_of(opened: Browser, element_id: str) -> str:
    return opened.find_element(By.ID, element_id).text


def test_attainment_of_each_tier_and_tenant(server: Live, page: Browser) -> None:
    for tier in ("gold", "batch", "gold"):
        assert server.post_with(KEY, prompt="abc", max_tokens=2, service_tier=tier)[0] == 200
    shown = {
        "tier gold, % good: 100.0",
        "tier batch, % good: 0.0",
        "tenant acme, % good: 66.7",
        "tenant idle, % good: –",
    }
    wait_until(page, lambda _: shown <= set(legends(page)))
    assert page.get_log("browser") == []


def test_a_server_without_tiers_has_no_chart_for_them(opened: Browser) -> None:
    with live() as plain:
        opened.get(plain.url)
        wait_until(opened, lambda _: len(legends(opened)) > 0)
        names = [legend.partition(":")[0] for legend in legends(opened)]
        assert names == [
            "good requests/s",
            "TTFT attainment, %",
            "TPOT attainment, %",
            "running",
            "waiting",
            "KV cache in use, %",
        ]
        assert len(opened.find_elements(By.TAG_NAME, "canvas")) == 4


def test_a_request_whose_tokens_are_judged_by_their_deadlines(page: Browser) -> None:
    page.find_element(By.CSS_SELECTOR, "#request button").click()
    wait_until(page, lambda _: "401" in text_of(page, "verdict"))
    page.find_element(By.ID, "key").send_keys("secret")
    for name, value in (("ttft", "20000"), ("tpot", "20000"), ("max_tokens", "7")):
        field = page.find_element(By.ID, name)
        field.clear()
        field.send_keys(value)
    page.find_element(By.CSS_SELECTOR, "#request button").click()
    wait_until(page, lambda _: "7 of 7 tokens in time" in text_of(page, "verdict"))
    assert len(page.find_elements(By.CSS_SELECTOR, "#tokens .kept")) == 7
    assert text_of(page, "tokens") == "Explain"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width_px", [320, 1200])
def test_it_fits_its_window_and_the_colors_that_are_preferred(
    page: Browser, scheme: str, width_px: int
) -> None:
    show_as(page, width_px, scheme)
    luminance = "value.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0)"
    text, back = (
        page.execute_script(
            f"const value = getComputedStyle(document.body).{part}; return {luminance}"
        )
        for part in ("color", "backgroundColor")
    )
    assert (text < back) == (scheme == "light")
    wide, window = page.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= window
