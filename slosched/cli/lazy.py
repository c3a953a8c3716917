"""Commands that are imported when they are run: before, their names and summaries will do.

Together they import numpy and half the package, a second of work that `slosched --help`, a slip in
a command's name and `--version` can do without.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

SUMMARIES = {
    "profile": "Measure how long batches take: pure prefills, pure decodes, mixes and swaps.",
    "fit": "Fit how long a step takes, and say how wrong the fit is on steps it has not seen.",
    "serve": "Serve a model: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.",
    "replay": "Replay a trace open loop and score it: requests arrive on time whatever became of "
    "others.",
    "compare": "Simulate policies on the same trace and device; leave a table, figures and an HTML "
    "report.",
    "bounds": "Print how many requests of a trace any scheduler at all could serve well, by four "
    "bounds.",
    "capacity": "Find the highest rate at which a policy serves 90 % and 99 % of all requests as "
    "promised.",
    "tune": "Give a policy its best hyper-parameters, so that it is compared at its best.",
    "policies": "List the scheduling policies, their options and defaults.",
    "demo": "Profile a real model here, fit, serve it, replay a trace live under three policies, "
    "compare.",
    "trace": "Make a trace, read one and show its statistics, or fetch one.",
}
"""By command, the first sentence of what it says of itself: `slosched.cli.commands.NAME.NAME`."""


class LazyCommands(TyperGroup):
    """A group of commands that are known by their summaries and imported to be run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else _imported(name), rest


def add_summaries(app: typer.Typer) -> None:
    """Add every command by its summary to an app whose group is `LazyCommands`."""
    for name, summary in SUMMARIES.items():
        app.command(name, short_help=summary)(_not_imported)


def _not_imported() -> None:
    raise AssertionError("LazyCommands runs the command that it imports, never its stand-in")


def _imported(name: str) -> Any:
    """Return the command, or the group of commands, as typer runs it."""
    found: typer.Typer | Callable[..., None]
    found = getattr(import_module(f"slosched.cli.commands.{name}"), name)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        alone.command(name)(found)
        found = alone
    return typer.main.get_command(found)
