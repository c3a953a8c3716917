"""The soak finds nothing in a few seconds."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from scripts import ROOT
from soak.fuzzer import ENDPOINTS, Fuzzer
from soak.verdicts import Verdicts

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


def test_the_same_seed_makes_the_same_bodies_for_every_endpoint() -> None:
    one, other = (Fuzzer(random.Random(3)) for _ in range(2))
    sent = [one.next() for _ in range(300)]
    assert sent == [other.next() for _ in range(300)]
    assert {each.path.partition("?")[0] for each in sent} == {*ENDPOINTS, "/v1/quote"}
