"""`python -m slosched`."""

from slosched.cli import main

main()
