"""What the scripts in `benchmarks/` and `tools/` say to wrong arguments."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def complaint(script: str, *arguments: str) -> str:
    """Return what a script that has to fail writes as its error."""
    command = [sys.executable, "-m", script, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode, done.stdout
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.replace("│", " ").split())  # without the box around it


def test_every_benchmark_is_in_the_list() -> None:
    listed = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = (ROOT / "benchmarks").glob("*.py")
    missing = [p.name for p in scripts if "__main__" in p.read_text() and p.name not in listed]
    assert not missing


@pytest.mark.parametrize(
    "name", ["compiled_mlps", "draft_choice", "grammars", "paged_kernel", "speculation"]
)
def test_a_benchmark_without_options_refuses_them(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, since each of its own would import torch and transformers again."""
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", "--turns", "1"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    assert end.value.code
    assert "unrecognized arguments: --turns 1" in capsys.readouterr().err


@pytest.mark.e2e
def test_the_gateway_needs_a_request_for_each_client() -> None:
    said = complaint("benchmarks.gateway", "-n", "20", "--clients", "32")
    assert "-n 20 leaves some of the 32 --clients without" in said


@pytest.mark.e2e
def test_the_gateway_says_why_there_is_no_router() -> None:
    said = complaint("benchmarks.gateway", "--router", "nobody")
    assert "no router 'nobody'" in said
    assert said.endswith("slosched route --router nobody has ended; it said above why")


@pytest.mark.e2e
def test_a_folder_without_runs_is_told() -> None:
    said = complaint("benchmarks.saturation", str(ROOT))
    assert "a clone of inference-sim/training?" in said


@pytest.mark.e2e
def test_the_fit_of_the_public_traces_says_how_it_is_called() -> None:
    assert "python -m tools.fit_public_traces ../shared/traces" in complaint(
        "tools.fit_public_traces"
    )
