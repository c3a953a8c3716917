from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Said

from slosched.cli import main


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """Run the command line in this process, in an empty folder: `cli("trace", "show", …)`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["slosched", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            sys.exit(main())
        said = capsys.readouterr()
        return Said(int(end.value.code or 0), said.out, said.err)

    return run
