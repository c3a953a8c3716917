"""The start of the command line: what it imports, and how long it takes."""

from __future__ import annotations

import inspect
import json
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

from slosched.cli.lazy import SUMMARIES

pytestmark = pytest.mark.e2e

MOST_S = 0.3
HEAVY = {
    *("aiohttp", "matplotlib", "pandas", "pyarrow", "scipy", "sklearn"),
    *("starlette", "torch", "transformers", "vllm"),
}
"""Packages that take 0.1 s or more to import and that only some commands need."""
_RUN = """
import json, sys
from importlib import import_module
for module in {modules}:
    import_module(module)
sys.argv = ["slosched", *{arguments}]
from slosched.cli import main
try:
    main()
except SystemExit:
    pass
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""


def imported_by(*arguments: str, modules: tuple[str, ...] = ()) -> set[str]:
    """Return the packages that a process imports to import `modules` and to run a command."""
    code = _RUN.format(modules=modules, arguments=arguments)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_no_command(option: str) -> None:
    found = imported_by(option)
    assert "typer" in found
    assert not found & (HEAVY | {"numpy"})


def test_the_list_of_policies_imports_nothing_heavy() -> None:
    found = imported_by("policies")
    assert "numpy" in found  # policies compute with it
    assert not found & HEAVY


@pytest.mark.parametrize("command", ["compare -p fcfs", "replay"])
def test_a_report_without_figures_needs_no_matplotlib(command: str, tmp_path: Path) -> None:
    out = ("-n", "5", "-o", str(tmp_path), "--no-figures")
    found = imported_by(*command.split(), *out)
    assert "pandas" in found
    assert "matplotlib" not in found


def test_no_command_imports_anything_heavy_before_it_runs() -> None:
    """Its help, and the message on a mistake in its options, need no heavy package."""
    commands = tuple(f"slosched.cli.commands.{name}" for name in SUMMARIES)
    assert not imported_by("--version", modules=commands) & HEAVY


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_is_the_first_sentence_of_the_command(name: str) -> None:
    command = getattr(import_module(f"slosched.cli.commands.{name}"), name)
    text = command.info.help if isinstance(command, typer.Typer) else inspect.getdoc(command)
    assert text.split("\n\n")[0].replace("\n", " ") == SUMMARIES[name]


@pytest.mark.cost
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_line_starts_at_once(option: str) -> None:
    """It is the best of five processor times, which a busy machine does not change much."""
    assert min(_processor_s(option) for _ in range(5)) <= MOST_S


def _processor_s(option: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "slosched", option], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
