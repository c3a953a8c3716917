"""The server's event loop tells how long it kept its clients waiting."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time

import pytest
from live_server import live
from scripts import ROOT

from slosched.engine.server.event_loop import TimedLoop

NAP_S = 0.05


def test_the_longest_turn_is_that_in_which_others_had_to_wait() -> None:
    async def work() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, TimedLoop)
        await asyncio.sleep(2 * NAP_S)
        waiting_s = loop.turns.longest_s
        time.sleep(NAP_S)  # what no handler should do
        await asyncio.sleep(0)
        return waiting_s, loop.turns.longest_s

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        waiting_s, longest_s = runner.run(work())
        turns = runner.get_loop().turns  # type: ignore[attr-defined]
    assert waiting_s < longest_s
    assert longest_s >= NAP_S
    assert turns.longest_cpu_s < longest_s, "sleeping takes no processor time"


def test_metrics_tell_turns_and_tasks() -> None:
    with live() as server:
        page = server.get("/metrics")[1]
        later = server.get("/metrics")[1]
    assert re.search(r"^slosched:event_loop_tasks [1-9]", page, re.MULTILINE)
    name = "slosched:event_loop_turn_seconds_count"
    counts = [re.search(rf"^{name} (\d+)$", each, re.MULTILINE) for each in (page, later)]
    assert counts[0] is not None
    assert counts[1] is not None
    assert 0 < int(counts[0][1]) < int(counts[1][1])


IMPORTS_PROGRAM = """
import http.client, json, sys
from live_server import live

with live() as server:
    before = set(sys.modules)
    for is_stream in (False, True):
        client = http.client.HTTPConnection(server.url.removeprefix("http://"))
        body = json.dumps({"prompt": "abc", "stream": is_stream})
        client.request("POST", "/v1/completions", body)
        assert client.getresponse().read()
    print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.e2e
def test_the_first_requests_wait_for_no_large_import() -> None:
    """The event loop stands still meanwhile; the parts of anyio that streams use take 0.1 s."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    found = subprocess.run(
        [sys.executable, "-c", IMPORTS_PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    late = json.loads(found.stdout)
    assert [name for name in late if name.startswith(("anyio", "starlette", "slosched"))] == []
