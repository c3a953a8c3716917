"""The soak finds nothing in a few seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest
from scripts import ROOT


@pytest.mark.e2e
@pytest.mark.slow
def test_bad_clients_leave_nothing_behind() -> None:
    command = [sys.executable, "tests/soak.py", "--seconds", "5", "--health-ms", "10000"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout
    assert "steady 200" in found.stdout
