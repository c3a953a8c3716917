"""Which code made a result: a result of other code is not taken for one of this."""

from __future__ import annotations

import ast
import hashlib
import inspect
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from slosched.core import Policy
from slosched.policy.spec import policy_classes

_PACKAGE = Path(__file__).parents[2]
_REPLAYED = (
    "core.py",
    "batch.py",
    "scheduler/",
    "kv/",
    "perfmodel/",
    "policy/spec.py",
    "policy/wrapper.py",
    "engine/",
    "workload/trace.py",
    "evaluate/metrics",
    "evaluate/capacity/outcomes.py",
    "evaluate/capacity/point.py",
)
"""What a replay runs; traces, SLOs and models are in a point's key, wherever they came from."""
_POLICY_MODULES = "slosched.policy."
_NOT_REPLAYED = ("engine/torch/", "engine/server/", "engine/profiling/", "policy/__init__.py")


def code_digest(policy: str) -> str:
    """Of every source file that a replay of this policy runs, its own modules among them.

    Finer than a commit: an edit that is not committed counts, one to the documentation, to another
    policy or to a part of it does not, and it works where there is no git.
    """
    return _digest_with(tuple(policy_classes(policy)))


@cache
def tree_digest() -> str:
    """Of every source file that a replay of any policy of the package runs."""
    summed = hashlib.sha256(_package_digest().encode())
    for path in sorted((_PACKAGE / "policy").glob("*.py")):
        summed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return summed.hexdigest()


@cache
def git_hash() -> str:
    """The commit of this tree, `-dirty` if it was edited since; `none` where there is no git."""
    command = ["git", "-C", str(_PACKAGE), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return ran.stdout.strip()


@cache  # By class, which a module that was edited and loaded again has anew.
def _digest_with(classes: tuple[type[Policy], ...]) -> str:
    summed = hashlib.sha256(_package_digest().encode())
    for name, source in sorted(_policy_sources(classes).items()):
        summed.update(name.encode() + b"\0" + source.encode() + b"\0")
    return summed.hexdigest()


def _policy_sources(classes: Sequence[type[Policy]]) -> dict[str, str]:
    """By module, of these classes and of what they import from `slosched.policy`."""
    pending = [ancestor.__module__ for one in classes for ancestor in one.__mro__[:-1]]
    sources: dict[str, str] = {}
    while pending:
        name = pending.pop()
        if name in sources or name in sys.stdlib_module_names:
            continue
        source = sources[name] = inspect.getsource(sys.modules[name])
        imports = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom))
        named = (n.module or "" for n in imports)
        pending += [module for module in named if module.startswith(_POLICY_MODULES)]
    return sources


@cache
def _package_digest() -> str:
    summed = hashlib.sha256()
    for name in sorted(_replayed()):
        summed.update(name.encode() + b"\0" + (_PACKAGE / name).read_bytes() + b"\0")
    return summed.hexdigest()


def _replayed() -> Iterator[str]:
    for path in _PACKAGE.rglob("*.py"):
        name = path.relative_to(_PACKAGE).as_posix()
        if name.startswith(_REPLAYED) and not name.startswith(_NOT_REPLAYED):
            yield name
