"""What every experiment's command line does the same: its errors, and who made a result."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime

import typer

from slosched.cli.console import complain
from slosched.core import SloschedError
from slosched.evaluate.capacity.code import git_hash, tree_digest


def start(app: typer.Typer) -> None:
    """Run the command that was typed; what it cannot do ends in one line and status 1."""
    try:
        app()
    except (SloschedError, ValueError, OSError) as error:
        complain(error)
        raise SystemExit(1) from error


def provenance(experiment: str) -> dict[str, object]:
    """Who made a result: which code, where, when, and by which command."""
    return {
        "git_hash": git_hash(),
        "code_digest": tree_digest()[:16],
        "command": shlex.join(["python", "-m", f"experiments.{experiment}", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }
