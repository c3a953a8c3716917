"""The soak finds nothing in a few seconds."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys

import pytest
from live_server import live
from scripts import ROOT
from soak.fuzzer import ENDPOINTS, Fuzzer
from soak.promised import ask, completion
from soak.verdicts import Verdicts

from slosched.core import SLO
from slosched.workload import TraceRequest

PATHS = os.pathsep.join((str(ROOT), str(ROOT / "tests")))


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--seconds", "20"), ("--bodies", "2000")])
def test_bad_clients_leave_nothing_behind(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "soak", *arguments, "--health-ms", "10000"]
    environment = {**os.environ, "PYTHONPATH": PATHS}
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert found.returncode == 0, found.stdout
    assert "BROKEN" not in found.stdout
    assert "kept    the server ends with status 0" in found.stdout


@pytest.mark.parametrize(("found", "status"), [(98.0, 0), (97.9, 1)])
def test_a_goal_that_is_missed_is_the_exit_status(found: float, status: int) -> None:
    verdicts = Verdicts()
    verdicts.at_most("late", 1, 1)
    verdicts.at_least("in time", found, 98, " %")
    assert verdicts.report() == status


@pytest.mark.parametrize(("num_tokens", "status"), [(4, 200), (10_000, 400)])
def test_a_client_that_was_promised_something_judges_its_stream(
    num_tokens: int, status: int
) -> None:
    slo = SLO(60.0, 60.0)
    request = TraceRequest("r", 0.0, 20, num_tokens, slo)
    with live() as server:
        outcome = asyncio.run(ask(server.url, completion(request), num_tokens))
    assert outcome.status == status
    assert outcome.is_good(slo) == (status == 200)
    assert not outcome.is_good(SLO(1e-9, 60.0))


def test_the_same_seed_makes_the_same_bodies_for_every_endpoint() -> None:
    one, other = (Fuzzer(random.Random(3)) for _ in range(2))
    sent = [one.next() for _ in range(300)]
    assert sent == [other.next() for _ in range(300)]
    assert {each.path.partition("?")[0] for each in sent} == {*ENDPOINTS, "/v1/quote"}
