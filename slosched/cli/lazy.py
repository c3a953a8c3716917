"""Commands that are imported only when they are run; until then, names and summaries suffice.

Importing all commands takes about a second, as they need numpy and half the package. `--help`,
`--version` and the message on a misspelt command do not have to wait for that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from slosched.cli.starting import begin

SUMMARIES = {
    "profile": "Measure how long batches take: pure prefills, pure decodes, mixes and swaps.",
    "fit": "Fit a latency model to a profile, and print its error on steps that were not fitted.",
    "serve": "Serve a model over OpenAI's API: completions, chat, responses, models, and /metrics.",
    "route": "Route requests to several servers: one address, one of eight routers, failover.",
    "top": "Watch a running server: queue, KV cache, goodput, attainment, latencies, rejections.",
    "replay": "Replay a trace and score it: requests are sent on time, however slow the answers.",
    "explain": "Say in plain sentences what a portfolio chose in a simulated replay, and why.",
    "compare": "Simulate policies on the same trace and device; write a table, figures and an HTML "
    "report.",
    "bounds": "Print four upper bounds on how many requests of a trace any scheduler can serve "
    "well.",
    "capacity": "Find the highest rate at which a policy serves 90 % and 99 % of all requests as "
    "promised.",
    "plan": "Find the cheapest fleet that serves 99 % of all requests as promised, and the second "
    "best.",
    "judge": "Give a verdict on a policy: ahead of the best known ones, level with them, or "
    "behind.",
    "tune": "Find a policy's best hyper-parameters, so that it is compared at its best.",
    "shadow": "Say what a policy would have gained on the traffic of a vLLM in shadow mode.",
    "policies": "List the scheduling policies, their options and defaults.",
    "demo": "Profile a real model here, fit, serve it, replay a trace live under three policies, "
    "compare.",
    "doctor": "List devices, libraries and attention backends: what is there, and what installs "
    "the rest.",
    "trace": "Make a trace, read one and show its statistics, or fetch one.",
}
"""The first sentence of each command's docstring (`slosched.cli.commands.NAME.NAME`)."""


class LazyCommands(TyperGroup):
    """A group of commands that are listed by their summaries and imported when they are run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else _imported(name), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = _with_its_value(error)
            raise


def add_summaries(app: typer.Typer) -> None:
    """Add the name and summary of every command to an app whose group is `LazyCommands`."""
    for name, summary in SUMMARIES.items():
        app.command(name, short_help=summary)(_not_imported)


def _with_its_value(error: typer.BadParameter) -> str:
    """Return the message on a wrong value, which it names.

    Where pydantic reads the values of options, as newer versions of typer have it, typer shows what
    pydantic says: `Input should be a valid integer, unable to parse string as an integer`.
    """
    found = getattr(error.__cause__, "errors", None)
    if found is None:
        return error.message
    first = found()[0]
    said, _, _ = str(first["msg"]).removeprefix("Value error, ").partition(", unable to parse")
    return said.replace("Input should", f"{first['input']!r} should", 1)


def _not_imported() -> None:
    raise AssertionError("LazyCommands runs the command that it imports, never its stand-in")


def _imported(name: str) -> Any:
    """Return the command, or the group of commands, as typer runs it."""
    found: typer.Typer | Callable[..., None]
    found = getattr(import_module(f"slosched.cli.commands.{name}"), name)
    if isinstance(found, typer.Typer):
        begin()
    else:
        alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        alone.command(name)(_beginning(found))
        found = alone
    return typer.main.get_command(found)


def _beginning(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command; when it is called, Ctrl-C and SIGTERM become its own affair."""

    @wraps(command)
    def begun(**values: Any) -> None:
        begin()
        command(**values)

    return begun
