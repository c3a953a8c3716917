"""The command line: `slosched profile | fit | serve | replay | compare | trace | policies`."""

from slosched.cli.entry import main

__all__ = ["main"]
