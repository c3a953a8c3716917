"""The command line: `slosched profile | fit | serve | replay | compare | trace | policies`."""

from slosched.cli.main import app, main

__all__ = ["app", "main"]
