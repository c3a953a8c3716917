"""Headless Chromium, driven by Selenium, for tests of the server's page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

Browser = webdriver.Chrome
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""What Chromium needs without a screen and as root, and what keeps it from asking for updates."""


@contextmanager
def browser() -> Iterator[Browser]:
    """Yield a browser with a new profile; skip the test where there is no Chromium."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in _ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, Service(driver)) as opened:
        yield opened


def show_as(opened: Browser, width_px: int, scheme: str) -> None:
    """Give the page a width, and the colors (`light` or `dark`) that its user prefers."""
    size = {"width": width_px, "height": 1400, "deviceScaleFactor": 1, "mobile": False}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def wait_until(opened: Browser, condition: Callable[[Browser], bool]) -> None:
    """Return when the condition holds; fail if it does not within half a minute."""
    WebDriverWait(opened, 30, 0.1).until(condition)
