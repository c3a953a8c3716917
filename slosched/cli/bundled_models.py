"""`slosched profile --list`: the latency models that come with slosched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slosched.cli.console import console
from slosched.perfmodel import FittedModel, bundled_models, load_model

_COLUMNS = ("name", "GPU", "engine", "form", "MAPE / p99", "KV cache", "server", "origin")
_NUMBERS = ("MAPE / p99", "KV cache")
_FOLDED = ("GPU", "server", "origin")
_WIDTH_IN_A_FILE = 180


def _print_bundled(asked: bool) -> None:
    if not asked:
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 0), pad_edge=False)
    for column in _COLUMNS:
        # In a narrow window, names of several words are wrapped.
        table.add_column(
            column,
            justify="right" if column in _NUMBERS else "left",
            no_wrap=column not in _FOLDED,
            overflow="fold",
        )
    for name in bundled_models():
        table.add_row(*map(escape, model_row(name, load_model(name))))
    # Output to a file need not fit into a window.
    (console if console.is_terminal else Console(width=_WIDTH_IN_A_FILE)).print(table)
    console.print(
        "Errors in % of the measured time, on steps that were not fitted; KV cache in thousands of "
        "tokens; server: what it adds to the device's times.  Take one with `--latency-model "
        "NAME`; `--emulate NAME` serves at its speed."
    )
    raise typer.Exit


def model_row(name: str, model: FittedModel) -> tuple[str, ...]:
    """Return the cells of a row of the table: what a user needs to choose this latency model."""
    said = model.provenance
    error = model.held_out_error
    return (
        name,
        _device(said),
        said.get("engine", "?").partition(",")[0],
        model.form,
        f"{error['mape']:.1f} / {error['p99']:.1f}" if {"mape", "p99"} <= set(error) else "?",
        f"{int(said['kv_capacity_tokens']) // 1000}k" if "kv_capacity_tokens" in said else "?",
        str(model.server_time),
        said.get("origin", "?"),
    )


def _device(said: Mapping[str, str]) -> str:
    gpu = said.get("gpu") or said.get("device", "?")
    for maker in ("NVIDIA ", "GeForce "):
        gpu = gpu.removeprefix(maker)
    count = int(said.get("num_gpus", "1"))
    return f"{count} × {gpu}" if count > 1 else gpu


ShowBundled = Annotated[
    bool,
    # Eager: with --list nothing is measured.
    typer.Option(
        "--list",
        callback=_print_bundled,
        is_eager=True,
        help="Print the latency models that come with slosched and exit.",
    ),
]
