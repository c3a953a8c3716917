"""The documents are true: their code runs, their commands exist and their links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main

from slosched.cli.program import app
from slosched.core import EndReason
from slosched.evaluate.as_shipped import ENGINES
from slosched.policy import POLICIES, WRAPPERS, kit
from slosched.policy.spec import make_policy, policy_fields

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


# What a reader's tests play takes half a minute.
_FEWER_EXAMPLES = """
from slosched.testing import check_policy

check_policy.__kwdefaults__["max_examples"] = 8
"""
_RUN_AND_CHECK = """
import runpy, sys
from slosched.core import Policy
from slosched.testing import check_policy

sys.path.insert(0, "")
import fewer_examples
for path in sys.argv[1:]:
    for defined in runpy.run_path(path).values():
        is_policy = isinstance(defined, type) and issubclass(defined, Policy)
        if is_policy and defined.__module__ == "<run_path>":
            check_policy(defined)
"""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in _BLOCK.findall(page.read_text("utf-8")) if found == language]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every `slosched …` command in a shell block or between backticks."""
    text = page.read_text("utf-8")
    shell = [*blocks(page, "sh"), *blocks(page, "")]
    lines = [line for code in shell for line in code.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(slosched [^`]+)`", _BLOCK.sub("", text))
    for line in lines:
        line = line.strip().removeprefix("$ ")
        if line.startswith("slosched ") and "…" not in line:
            words = shlex.split(line, comments=True)
            if "|" not in words:  # that of a shell; the one in a policy is in quotes
                yield words[1:]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_takes_slosched_from_a_registry(page: Path) -> None:
    """None has it, so the first installation is from a clone; extras can be added by name."""
    assert not re.findall(r"pip install slosched\b", page.read_text("utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_their_options_exist(page: Path) -> None:
    for words in commands(page):
        command: Any = typer.main.get_command(app)
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, words
            _, command, words = command.resolve_command(None, words)
        if "--" in words:  # the options of another program follow
            words = words[: words.index("--")]
        parser = command.make_parser(typer.Context(command))
        _, left, _ = parser.parse_args([*words, "a value, if the text ends with an option"])
        assert len(left) <= 1, f"{left} of {words} are no arguments"
        known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        used = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
        assert set(used) <= known, words
        for option, value in pairwise(words):
            if option not in ("-p", "--policy") or is_of_the_reader(value, page):
                continue
            if value.startswith("like:"):
                assert value.removeprefix("like:") in ENGINES
            else:
                make_policy(value)


def is_of_the_reader(policy: str, page: Path) -> bool:
    """Tell whether the page shows how to write this policy, so that it is in no table."""
    name = policy.partition(":")[0]
    return name.startswith(("mine.", "my_package.")) or f'"{name}": ' in page.read_text("utf-8")


@pytest.mark.e2e
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_code_runs(page: Path, tmp_path: Path) -> None:
    """A block whose first line is `# some/file.py` becomes that file, and test files are run.

    Other blocks are run in the folder of these files, and the policies that they define must obey
    the laws.
    """
    for i, code in enumerate(blocks(page, "python")):
        named = re.match(r"# (\S+\.py)\n", code)
        path = tmp_path / (named[1] if named else f"block_{i}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
    written = sorted(tmp_path.rglob("*.py"))
    (tmp_path / "fewer_examples.py").write_text(_FEWER_EXAMPLES, encoding="utf-8")
    scripts = [path for path in written if path.name.startswith("block_")]
    tests = [path for path in written if path.name.startswith("test_")]
    if scripts:
        run(tmp_path, "-c", _RUN_AND_CHECK, *map(str, scripts))
    if tests:
        options = ("-q", "-p", "no:cacheprovider", "-p", "fewer_examples")
        run(tmp_path, "-m", "pytest", *options, *map(str, tests))


def run(folder: Path, *arguments: str) -> None:
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", [*POLICIES, *WRAPPERS])
def test_every_policy_has_its_page_with_all_its_options(name: str) -> None:
    page = DOCS / "policies" / f"{name}.md"
    assert page.exists(), f"write {name_of(page)}"
    text = page.read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, flags=re.MULTILINE))
    fields = policy_fields((POLICIES | WRAPPERS)[name])
    assert rows == {option: str(default) for option, default, _ in fields}
    for _, _, choices in fields:
        assert all(f"`{choice}`" in text for choice in choices)
    for heading in ("What it decides", "Source", "When to use it", "Known weaknesses"):
        assert f"**{heading}" in text, heading


def test_there_is_no_page_of_a_policy_that_is_none() -> None:
    assert {path.stem for path in (DOCS / "policies").glob("*.md")} == {*POLICIES, *WRAPPERS}


def test_the_kit_has_a_table_of_all_its_parts() -> None:
    parts = {name for name, part in vars(kit).items() if callable(part)}
    named = set(re.findall(r"`(\w+)`", kit.__doc__ or ""))
    assert len(parts) > 20
    assert parts <= named


def test_the_architecture_names_every_reason_to_end_and_only_files_that_exist() -> None:
    text = (DOCS / "architecture.md").read_text("utf-8")
    assert all(f"`{reason}`" in text for reason in EndReason)
    for path in re.findall(r"`([a-z_/]+(?:\.py|/))`", text):
        inside = (ROOT / "slosched" / path, ROOT / path, ROOT / "slosched/engine/server" / path)
        assert any(candidate.exists() for candidate in inside), path
