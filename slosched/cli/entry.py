"""Where the installed script begins, before anything large is imported."""

from __future__ import annotations

from slosched.cli.starting import begin, watch


def main() -> None:
    """Run the command line; until its command has begun, a signal ends the process at once."""
    watch()
    try:
        from slosched.cli.program import run

        run()
    finally:
        begin()
