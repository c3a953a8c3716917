"""`slosched top` on a running server."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from command_line import SLOSCHED, Said
from live_server import Live, live
from small_server import answering

from slosched.cli.live_metrics import Span
from slosched.core import SLO
from slosched.metrics.page import parse_metrics
from slosched.workload.service_tier import ServiceTier

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """A server that kept both promises to one request and refused one as too long."""
    tiers = (ServiceTier("default", SLO(20, 20)), ServiceTier("batch"))
    with live(tiers=tiers, tenants={"secret": "acme", "other": "idle"}) as running:
        for max_tokens, status in ((3, 200), (5000, 400)):
            body = {"prompt": "abc", "max_tokens": max_tokens}
            assert running.post(**body, headers={"authorization": "Bearer secret"})[0] == status
        yield running


def cells(frame: str) -> dict[str, str]:
    """Return the value next to each name in the table."""
    rows = [re.findall(r"[^│]+", line) for line in frame.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in rows}


def test_once_prints_what_happened_since_the_start(server: Live, cli: Cli) -> None:
    said = cli("top", server.url, "--once")
    assert (said.status, said.err) == (0, "")
    assert server.url in said.out
    assert "since its start" in said.out
    shown = cells(said.out)
    assert shown["running"] == shown["waiting"] == shown["swapped"] == "0"
    assert shown["KV cache in use"] == "0.0%"
    assert float(shown["good requests/s"]) >= 0
    assert shown["TTFT attainment"] == shown["TPOT attainment"] == "100.0%"
    assert shown["E2E attainment"] == "–", "nobody asked for an end-to-end time"
    assert shown["tier default attainment"] == shown["tenant acme attainment"] == "100.0%"
    assert shown["tier batch attainment"] == shown["tenant idle attainment"] == "–"
    assert shown["rejected: too_long"] == "1"
    p50, p99 = (float(shown[name].removesuffix(" ms")) for name in ("TTFT p50", "TTFT p99"))
    assert 0 < p50 <= p99


def test_it_looks_again_until_ctrl_c(server: Live) -> None:
    command = [SLOSCHED, "top", server.url, "--interval", "20ms"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        deadline_s = time.monotonic() + 30
        looks = 'handler="/metrics",method="GET",status="2xx"} '
        first = looks_so_far(server, looks)
        # Each turn looks once itself.
        for turn in range(1, 10_000):
            if looks_so_far(server, looks) - first - turn >= 3:
                break
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "in the last 0 s" in out
    shown = cells(out)
    assert shown["TTFT p50"] == shown["TTFT attainment"] == "–", "nothing happened meanwhile"
    assert "rejected: too_long" not in shown


def looks_so_far(server: Live, looks: str) -> float:
    return float(server.get("/metrics")[1].partition(looks)[2].partition("\n")[0] or 0)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [("http://127.0.0.1:9", "is a server running there?"), ("localhost:8000", "write http://")],
)
def test_where_there_is_no_server_it_says_so(cli: Cli, url: str, complaint: str) -> None:
    said = cli("top", url, "--once")
    assert said.status in (1, 2)
    assert complaint in said.complaint


@pytest.mark.parametrize("page", [b"<script>\nconst app = 1\n</script>", b"\xff\xfe", b"up 1\n"])
def test_a_page_of_another_program_has_no_metrics(cli: Cli, page: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

    with answering(Other) as url:
        said = cli("top", url, "--once")
    assert said.status == 1
    assert "has no metrics of slosched or vLLM" in said.complaint


def test_engines_of_one_server_count_together() -> None:
    page = 'kv{engine="0"} 0.2\nkv{engine="1"} 0.6\nwaiting{engine="0"} 2\nwaiting{engine="1"} 3\n'
    snapshot = parse_metrics(page, 0)
    assert (snapshot.mean("kv"), snapshot.total("waiting")) == (0.4, 5)
    assert snapshot.mean("missing") is snapshot.total("missing") is None


def test_quantiles_are_those_of_what_was_counted_in_between() -> None:
    def page(*counts: int) -> str:
        bounds = ("0.1", "0.2", "+Inf")
        return "".join(
            f'x_bucket{{le="{bound}"}} {n}\n' for bound, n in zip(bounds, counts, strict=True)
        )

    span = Span(parse_metrics(page(5, 5, 5), 0), parse_metrics(page(5, 15, 15), 1))
    assert span.quantile("x", 0.5) == pytest.approx(0.15)
    assert span.quantile("x", 1.0) == pytest.approx(0.2)
    beyond = Span(parse_metrics(page(0, 0, 0), 0), parse_metrics(page(0, 0, 4), 1))
    assert beyond.quantile("x", 0.5) == float("inf")
    assert Span(span.now, span.now).quantile("x", 0.5) is None
    assert span.quantile("y", 0.5) is None
