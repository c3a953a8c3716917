"""A real Prometheus that scrapes one server, and the panels of Grafana dashboards asked of it."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRAPE_S = 0.5
RATE_INTERVAL_S = 6
"""What `$__rate_interval` becomes: as many scrapes as Grafana would take, at least four."""


@dataclass(frozen=True)
class Prometheus:
    url: str

    def series(self, query: str, last_s: float) -> list[list[float]]:
        """Return the values of each series of a query in the last seconds; NaN is no value."""
        now_s = time.time()
        span = {"start": now_s - last_s, "end": now_s, "step": SCRAPE_S}
        found = self._get("query_range", query=query, **span)["result"]
        values = [[float(value) for _, value in series["values"]] for series in found]
        return [[v for v in some if not math.isnan(v)] for some in values]

    def wait_until_scraped(self) -> None:
        deadline_s = time.monotonic() + 300
        while not any(map(any, self.series("up", 5))):
            assert time.monotonic() < deadline_s, "Prometheus reads nothing from the server"
            time.sleep(SCRAPE_S)

    def _get(self, what: str, **fields: Any) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)["data"]


@contextmanager
def prometheus(scraped: str, folder: Path) -> Iterator[Prometheus]:
    """Yield a Prometheus that scrapes the server at a URL; skip the test where there is none."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus (Debian: prometheus)")
    target = scraped.removeprefix("http://")
    settings = {
        "global": {"scrape_interval": f"{SCRAPE_S * 1000:.0f}ms"},
        "scrape_configs": [{"job_name": "served", "static_configs": [{"targets": [target]}]}],
    }
    config = folder / "prometheus.json"
    config.write_text(json.dumps(settings))  # JSON is YAML
    address = f"127.0.0.1:{_free_port()}"
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (
        (folder / "prometheus.log").open("wb") as log,
        subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdout=log, stderr=log
        ) as process,
    ):
        try:
            yield _ready(process, Prometheus(f"http://{address}"), folder / "prometheus.log")
        finally:
            process.kill()


def panels(dashboard: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the queries of each panel of a Grafana dashboard, by its title."""
    return {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in dashboard["panels"]
    }


def empty_queries(
    asked: Prometheus, shown: Mapping[str, list[str]], variables: Mapping[str, str], last_s: float
) -> dict[str, list[str]]:
    """Return the queries with nothing to draw in the last seconds, by the title of their panel.

    Those are the ones that have no series, and those with a series that has no value: its name
    would stand in the legend without a line.
    """
    empty: dict[str, list[str]] = {}
    for title, queries in shown.items():
        for query in queries:
            found = asked.series(_filled_in(query, variables), last_s)
            if not found or not all(found):
                empty.setdefault(title, []).append(query)
    return empty


def _filled_in(query: str, variables: Mapping[str, str]) -> str:
    for name, value in (("__rate_interval", f"{RATE_INTERVAL_S}s"), *variables.items()):
        query = query.replace(f"${name}", value)
    assert "$" not in query, query
    return query


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ready(process: subprocess.Popen[bytes], started: Prometheus, log: Path) -> Prometheus:
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text()
        try:
            started.series("up", 1)
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
        else:
            return started
    raise AssertionError(f"Prometheus was not ready in time: {log.read_text()}")
