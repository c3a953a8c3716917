"""The path that a model is read from, and what can be said of it before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

from slosched.core import SloschedError

_LFS_POINTER = b"version https://git-lfs.github.com/"


class ModelUnavailableError(SloschedError):
    """The model is not on this machine and could not be fetched, or its files cannot be read."""


def local_directory(name: str) -> Path | None:
    """Return the directory that `name` is a path of; None if the name may be one of the hub.

    Raises ModelUnavailableError for a file, and for a path at which nothing is.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf" or path.is_file():
        raise ModelUnavailableError(
            f"{name!r} is no model directory, which has a config.json and weights as "
            "*.safetensors; GGUF and other single files are not read"
        )
    if path.is_dir():
        return path
    if name.startswith((".", "~", os.sep)):
        raise ModelUnavailableError(f"no such model directory: {name!r}")
    return None


def check_no_pointers(directory: Path) -> None:
    """Raise ModelUnavailableError if a file is a pointer, as a clone without Git LFS leaves it."""
    for path in sorted(directory.iterdir()):
        if path.is_file() and _begins_as_pointer(path):
            raise ModelUnavailableError(
                f"{path} is only a pointer of Git LFS: fetch the file itself with `git lfs pull` "
                f"in {directory}"
            )


def _begins_as_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER
