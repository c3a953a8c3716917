"""The time of a decision: the benchmark of the tests, as a table."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

from experiments.command import provenance

ROOT = Path(__file__).parents[2]
_TEST = "tests/test_overhead.py::test_a_decision_takes_less_than_a_millisecond"


def measure() -> pd.DataFrame:
    """Return median and maximum of 51 decisions of each policy, in seconds, with provenance.

    A policy that exceeds its limit is in the table all the same.  Raises OSError if the benchmark
    leaves no results.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "benchmark.json"
        command = [sys.executable, "-m", "pytest", "-q", _TEST, f"--benchmark-json={path}"]
        subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr)
        if not path.exists():
            raise OSError(f"{' '.join(command)} left no results: see what it says above")
        found = json.loads(path.read_text("utf-8"))["benchmarks"]
    made = provenance("arena")
    return pd.DataFrame(
        {
            "scenario": "",
            "policy": one["params"]["name"],
            "median_s": one["stats"]["median"],
            "max_s": one["stats"]["max"],
            "rounds": one["stats"]["rounds"],
            **made,
        }
        for one in found
    )
