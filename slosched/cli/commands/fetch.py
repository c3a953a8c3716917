"""`slosched trace fetch`: download public traces from their publishers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from slosched.cli import options
from slosched.cli.console import console
from slosched.workload import PUBLIC_TRACES, cached_trace, fetch_trace, public_trace


def fetch(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="The trace to fetch: azure_conv_2023.  Default: list all traces."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            callback=options.writable,
            help="File or folder to write to: traces/.  Default: the cache, where --trace NAME "
            "finds it.",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Another URL of the same file, such as that of a mirror.")
    ] = None,
    sha256: Annotated[
        str | None,
        typer.Option(help="The SHA-256 that the file must have, instead of the known one."),
    ] = None,
    anew: Annotated[
        bool, typer.Option("--anew", help="Fetch the file even if it is already there.")
    ] = False,
) -> None:
    """Fetch a public trace, check it, and say where it comes from; without a name, list them.

    Examples:

    - `slosched trace fetch azure_conv_2023`
    - then `slosched replay --trace azure_conv_2023 -n 2000`
    """
    if name is None:
        _list()
        return
    trace = public_trace(name)
    target = out / f"{name}{trace.suffix}" if out and out.is_dir() else out
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task(f"fetching {name}", total=trace.size_bytes)

        def on_progress(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        fetched = fetch_trace(
            name, target, url=url, sha256=sha256, anew=anew, on_progress=on_progress
        )
    console.print(f"{name}: {trace.what}\nfrom {trace.source}, {trace.licence}")
    console.print(url or trace.url, soft_wrap=True, markup=False)
    verdict = "as you asked for" if sha256 else f"as known from {trace.checked}"
    console.print(f"sha256 {fetched.sha256} ({verdict})", soft_wrap=True)
    was = "was there already: " if fetched.was_there else "wrote "
    console.print(f"{was}{fetched.path}", soft_wrap=True, markup=False)


def _list() -> None:
    listed = Table("trace", "what", "MB", "licence", "fetched")
    for name, trace in PUBLIC_TRACES.items():
        size = "?" if trace.size_bytes is None else f"{trace.size_bytes / 1e6:,.1f}"
        here = "yes" if cached_trace(name).exists() else ""
        listed.add_row(name, trace.what, size, trace.licence, here)
    console.print(listed)
    console.print("`slosched trace fetch NAME`, then --trace NAME wherever a trace is asked for")
