"""Digests of the code that made a result, so that a result of other code is not used again.

A digest covers what the code does.  It stays the same when a definition moves to another file,
when an import changes its path, and when a comment or a docstring is rewritten.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from slosched.core import Policy
from slosched.policy.spec import policy_classes

_PACKAGE = Path(__file__).parents[2]
_REPLAY = "slosched.evaluate.capacity.point"
"""The module that runs a replay; all that it imports, directly or not, is code of a result."""
_TABLE = "slosched.policy"
"""The table of all policies.  It is not followed: a result depends on its own policy alone."""

_BY_NAME = ("slosched", "slosched.policy.kit")
"""Packages that only hand out names; a module that takes one depends on where that is defined."""


def code_digest(policy: str) -> str:
    """Return a digest of all code that a replay of this policy runs.

    It is finer than a commit.  An edit that is not committed changes it, an edit to the
    documentation or to another policy does not, and it works without git.
    """
    return _digest_with(tuple(policy_classes(policy)))


@cache
def tree_digest() -> str:
    """Return a digest of all code that a replay of any policy of the package runs."""
    policies = {name for name in _package_modules() if name.startswith(f"{_TABLE}.")}
    return _digest(replay_modules(()) | policies)


@cache
def git_hash() -> str:
    """Return the commit of this tree, `-dirty` if it was edited since; `none` without git."""
    command = ["git", "-C", str(_PACKAGE), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return ran.stdout.strip()


def replay_modules(classes: Iterable[type[Policy]]) -> set[str]:
    """Return the names of all modules that a replay of policies of these classes runs.

    They are the modules of the classes and of their base classes, the module that runs a replay,
    and what these import from slosched or from their own package.
    """
    pending = [_REPLAY]
    pending += [base.__module__ for one in classes for base in one.__mro__[:-1]]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name in found or name.partition(".")[0] in sys.stdlib_module_names:
            continue
        found.add(name)
        pending += _imported(name)
    return found


@cache  # A class whose module was edited and loaded again is another class.
def _digest_with(classes: tuple[type[Policy], ...]) -> str:
    return _digest(replay_modules(classes))


def _digest(modules: Iterable[str]) -> str:
    """Digest the statements of these modules, whatever module each of them is in."""
    statements = sorted(text for name in modules for text in _statements(_source(name)))
    return hashlib.sha256("\0".join(statements).encode()).hexdigest()


@cache
def _package_modules() -> dict[str, Path]:
    """Find the file of each module of slosched."""
    files = {}
    for path in _PACKAGE.rglob("*.py"):
        parts = path.relative_to(_PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def _source(name: str) -> str:
    """Read the source of a module: of slosched from its file, of any other as it was loaded."""
    if (path := _package_modules().get(name)) is not None:
        return path.read_text(encoding="utf-8")
    return inspect.getsource(sys.modules[name])


def _imported(name: str) -> Iterator[str]:
    """Name the modules of slosched and of the importing module's own package that it imports.

    A package stands for all of its modules, since it may hand out their names without importing
    them at once.
    """
    ours = _package_modules()
    own = name.partition(".")[0]
    for package, imported in _imports(_source(name)):
        module = f"{package}.{imported}"
        if module not in ours and module not in sys.modules:
            module = package
        while module in _BY_NAME and imported in (origins := _origins(module)):
            module = origins[imported]
        if module == _TABLE:
            continue
        if module in ours and ours[module].name == "__init__.py":
            yield from (m for m in ours if m.startswith(f"{module}."))
        elif module in ours or (module.partition(".")[0] == own and module in sys.modules):
            yield module


def _origins(package: str) -> dict[str, str]:
    """Map each name that a package hands out to the module that the package takes it from."""
    return {name: module for module, name in _imports(_source(package))}


@cache
def _imports(source: str) -> tuple[tuple[str, str], ...]:
    """List what a module imports by `from … import …`: where from, and what."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)]
    return tuple((node.module or "", alias.name) for node in nodes for alias in node.names)


@cache
def _statements(source: str) -> tuple[str, ...]:
    """Split a module into its statements, without comments, docstrings and imports."""
    tree = _Bare().visit(ast.parse(source))
    return tuple(ast.unparse(statement) for statement in tree.body)


class _Bare(ast.NodeTransformer):
    """Removes from a syntax tree what does not change what the code does."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if getattr(node, "body", None) == [] and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node

    def visit_Import(self, node: ast.Import) -> None:  # noqa: ARG002  # ast's own names
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:  # noqa: ARG002
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Drop docstrings of modules, classes, functions and fields."""
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        """Drop `__all__`."""
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        return None if names == ["__all__"] else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        """Drop imports that are for types alone."""
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if is_for_types else self.generic_visit(node)
