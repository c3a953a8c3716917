"""Imports point down, the core stays light, and policies touch neither clock nor tensor."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import slosched

PACKAGE = Path(__file__).parents[1] / "slosched"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("append_line", "core", "spelling"),
    ("batch", "kv", "metrics", "perfmodel", "workload"),
    ("policy", "scheduler"),
    ("engine",),
    ("simulator",),
    ("fleet", "replay"),
    ("gateway", "integrations", "testing"),
    ("evaluate",),
    ("cli",),
    ("__main__",),
)
"""The layers, the lowest first. A module imports only from its own part and from lower layers."""

HEAVY = {
    "torch",
    "transformers",
    "starlette",
    "uvicorn",
    "aiohttp",
    "safetensors",
    "gguf",
    "vllm",
    "triton",
}
NOT_FOR_POLICIES = HEAVY | {"time", "random", "os", "datetime", "asyncio", "threading"}


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of every module by name, without `slosched.`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree: ast.Module, *, everywhere: bool = True) -> Iterator[str]:
    """Yield the names of imported modules; with `everywhere=False` only those of the top level."""
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> tuple[int, str] | None:
    """Return the layer and the part that a module belongs to; of several parts the longest name."""
    found = [
        (len(part), layer, part)
        for layer, parts in enumerate(LAYERS)
        for part in parts
        if module == part or module.startswith(part + ".")
    ]
    if not found:
        return None
    _, layer, part = max(found)
    return layer, part


def test_every_module_has_its_place() -> None:
    unplaced = [name for name in modules() if name and layer_of(name) is None]
    assert unplaced == []


def imports_that_point_up(name: str, tree: ast.Module) -> Iterator[str]:
    """Yield a sentence for each import of a module from its own layer or a higher one."""
    own = layer_of(name)
    assert own is not None
    for imported in imports(tree):
        target = layer_of(imported.removeprefix("slosched."))
        if not imported.startswith("slosched.") or target is None or target[1] == own[1]:
            continue
        if target[0] >= own[0]:
            yield f"slosched.{name} must not import {imported}"


def test_imports_point_down() -> None:
    upward = [
        each
        for name, tree in modules().items()
        if name
        for each in imports_that_point_up(name, tree)
    ]
    assert upward == []


def imported_modules(name: str) -> set[str]:
    """Return the modules of the package that `name` imports anywhere, also in functions."""
    found = set()
    for imported in imports(modules()[name]):
        short = imported.removeprefix("slosched.")
        if imported.startswith("slosched.") and short in modules() and short != name:
            found.add(short)
    return found


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules in which each module reaches every other by imports."""
    reached = {name: {name} for name in arrows}
    for name in arrows:
        pending = list(arrows[name])
        while pending:
            if (target := pending.pop()) not in reached[name]:
                reached[name].add(target)
                pending += arrows[target]
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other])) for name in arrows
    }
    return [list(group) for group in sorted(groups) if len(group) > 1]


def test_no_imports_run_in_a_circle() -> None:
    """There is no circle inside a part, either.

    `from slosched.kv import x` counts as an import of the package `slosched.kv` unless x is a
    module of its own.
    """
    arrows = {name: imported_modules(name) for name in modules() if name}
    # `from package import module` names both; only the module is meant.
    for name, targets in arrows.items():
        tree = modules()[name]
        packages = {
            (node.module or "").removeprefix("slosched.")
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and all(
                f"{node.module}.{a.name}".removeprefix("slosched.") in modules() for a in node.names
            )
        }
        targets -= packages
    assert circles(arrows) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]


def test_the_rule_catches_an_arrow_that_points_up() -> None:
    tree = ast.parse("from slosched.engine.loop import Engine")
    named = "slosched.policy.edf must not import slosched.engine.loop"
    assert [*imports_that_point_up("policy.edf", tree)] == [named, f"{named}.Engine"]
    assert not [*imports_that_point_up("simulator.clients", tree)]


def test_policies_know_neither_clock_nor_chance_nor_tensor() -> None:
    for name, tree in modules().items():
        if name.startswith("policy"):
            used = {imported.split(".")[0] for imported in imports(tree)}
            assert not used & NOT_FOR_POLICIES, name


def test_heavy_libraries_are_imported_in_the_engine_alone() -> None:
    for name, tree in modules().items():
        hosts = ("engine.torch", "engine.server", "gateway", "replay.client", "integrations.vllm.")
        if not name.startswith(hosts):
            used = {i.split(".")[0] for i in imports(tree, everywhere=False)}
            assert not used & HEAVY, name


def test_importing_slosched_is_light() -> None:
    program = (
        "import sys, slosched, slosched.policy, slosched.simulator.simulate, slosched.cli,"
        "slosched.integrations.vllm.settings;"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_every_name_at_the_top_is_what_its_module_has() -> None:
    for name, module in slosched._MODULES.items():
        assert getattr(slosched, name) is getattr(import_module(module), name)
    assert {*slosched._MODULES} <= {*dir(slosched)}
    with pytest.raises(AttributeError, match="no attribute 'Polciy'"):
        slosched.Polciy  # type: ignore[attr-defined]  # noqa: B018


def test_types_are_told_of_every_name_at_the_top() -> None:
    (block,) = (node for node in modules()[""].body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    told = {alias.asname: node.module for node in imports for alias in node.names}
    assert told == slosched._MODULES


def test_a_policy_can_be_written_from_the_top_alone() -> None:
    program = (
        "import sys\n"
        "from slosched import BatchBuilder, Policy, SchedulerOutput, SchedulerView, simulate\n"
        f"assert not {HEAVY!r} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports them by their bare names."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert [name for name in sorted(names) if names.count(name) > 1] == []
