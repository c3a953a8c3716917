"""What the HTTP server adds to a device that was just profiled."""

from __future__ import annotations

from pathlib import Path

from slosched.cli.console import console
from slosched.cli.local_model import LocalModel, make_tokenizer
from slosched.perfmodel.measurement import append_server_time


def profile_server(local: LocalModel, out: Path) -> None:
    """Measure what a server in front of the model adds, and write it to the profile `out`.

    Without the serve extra, only print a note.
    """
    try:
        from slosched.replay.served import measured_server_time
    except ImportError as error:
        console.print(
            f"[yellow]note:[/] what a server adds is not measured, as the serve extra is missing "
            f"({error})"
        )
        return
    with console.status("measuring what the server adds"):
        tokenizer = make_tokenizer(local)
        times = measured_server_time(local.executor, tokenizer, local.num_blocks, local.block_size)
    append_server_time(times, out)
    console.print(f"the server adds {times}")
