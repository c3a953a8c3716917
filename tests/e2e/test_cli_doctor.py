"""`slosched doctor`, started as a user would."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from slosched.engine.torch.attention import BACKENDS

pytestmark = pytest.mark.e2e

_MAIN = "import sys; sys.argv = ['slosched', 'doctor']; from slosched.cli import main; main()"
_WITHOUT_TORCH = f"import sys; sys.modules['torch'] = None; {_MAIN}"


def said(program: str) -> str:
    """Return what a process prints that ends well, and is not told to use Triton's interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert run.stderr == ""
    return run.stdout


def test_doctor_lists_libraries_devices_and_backends() -> None:
    lines = {line.split()[0]: line for line in said(_MAIN).splitlines() if line.startswith("  ")}
    assert torch.__version__ in lines["torch"]
    assert "cores" in lines["cpu"]
    assert all(any(name in line for line in lines.values()) for name in BACKENDS)
    assert lines["sdpa"].endswith("ready")
    if not torch.cuda.is_available():
        assert "needs an NVIDIA GPU, and torch sees none" in lines["flash-attn"]
        best = "cpp" if lines["cpp"].endswith("ready") else "sdpa"
        assert f"{best} on cpu" in lines["auto"]


def test_doctor_without_torch_says_what_to_install() -> None:
    text = said(_WITHOUT_TORCH)
    assert "they need the torch extra" in text
    assert "pip install 'slosched[torch]'" in text
