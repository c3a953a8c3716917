"""`slosched profile --record`: a profile of the steps that a running server executes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from slosched.cli.console import console, progress_bar
from slosched.cli.options import server_url
from slosched.cli.sigterm import sigterm_as_ctrl_c
from slosched.perfmodel.measurement import append_server_time
from slosched.replay.recorder import RecordError, Recording, record_steps

HEEDED_BY_RECORD = frozenset({"record", "api_key", "time_limit", "out", "overwrite"})
"""The options of `profile` that have an effect beside --record."""

RecordUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        callback=server_url,
        help="Run no model: record the batch and the time of every step of the server at this URL, "
        "for --time-limit: http://127.0.0.1:8000.",
    ),
]


def record_to(
    out: Path, url: str, time_limit_s: float, overwrite: bool, api_key: str | None
) -> None:
    """Write the steps to `out` until the time is up, the server stops, or Ctrl-C or SIGTERM."""
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists; name another file, or replace it with --overwrite")
    recording = Recording(out)
    with progress_bar() as progress, sigterm_as_ctrl_c():
        task = progress.add_task(f"recording {url}", total=round(time_limit_s))

        def show(recording: Recording, elapsed_s: float) -> None:
            progress.update(task, completed=int(elapsed_s), description=_described(recording))

        try:
            record_steps(url, recording, time_limit_s, show, api_key)
        except KeyboardInterrupt:
            progress.update(task, description=f"{_described(recording)}; stopped")
    if recording.ended is not None:
        console.print(f"[yellow]note:[/] the server ended the recording: {escape(recording.ended)}")
    if recording.num_missing:
        console.print(
            f"[yellow]note:[/] {recording.num_missing} steps are missing: the server ran "
            "them faster than they could be read"
        )
    if not recording.num_steps:
        raise RecordError(
            f"nothing was recorded: the server at {url} ran no step in this time; "
            f"send it traffic, as with `slosched replay --url {url}`"
        )
    append_server_time(recording.server_time, out)
    console.print(
        f"wrote {_described(recording)} to {out}; the server adds {recording.server_time}",
        markup=False,
    )


def _described(recording: Recording) -> str:
    regimes = ", ".join(f"{count} {name}" for name, count in recording.regimes.most_common())
    return f"{recording.num_steps} steps" + (f" ({regimes})" if regimes else "")
