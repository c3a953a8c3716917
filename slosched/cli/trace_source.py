"""The sources of a trace: a file, a public trace that was fetched, or a kind to make up."""

from __future__ import annotations

import math
from pathlib import Path

from rich.markup import escape

from slosched.cli.console import console
from slosched.core import NO_SLO
from slosched.spelling import meant
from slosched.workload import (
    KINDS,
    PUBLIC_TRACES,
    Trace,
    TraceError,
    cached_trace,
    read_trace,
    synthesize,
)

SYNTHETIC_REQUESTS = 200


def is_kind(source: str) -> bool:
    """Tell whether a source is a kind of trace to make up, and no file of that name."""
    return source in KINDS and not _is_there(Path(source))


def make_up(
    kind: str,
    num_requests: int | None,
    duration_s: float | None,
    rate: float | None,
    cv: float | None,
    seed: int,
) -> Trace:
    """Return a synthetic trace; of 200 requests if neither a number nor a duration is given."""
    if num_requests is not None and duration_s is not None:
        raise ValueError(
            f"a made-up trace has either {num_requests} requests (-n) or as many as arrive in "
            f"{duration_s:g} s (--duration): leave out one of the two"
        )
    if num_requests is None and duration_s is None:
        num_requests = SYNTHETIC_REQUESTS
    return synthesize(
        kind, num_requests=num_requests, duration_s=duration_s, rate=rate, cv=cv, seed=seed
    )


def read_part(
    source: str,
    num_requests: int | None,
    start_s: float,
    duration_s: float | None,
    skip_bad: bool,
    seed: int,
) -> Trace:
    """Return a part of a trace file, or of a public trace by its name.

    Prints a note for everything that had to be mended while reading.
    """
    path = Path(source)
    if source in PUBLIC_TRACES and not _is_there(path):
        path = cached_trace(source)
        if not path.exists():
            raise TraceError(
                f"the public trace {source!r} is not on this machine; "
                f"get it with `slosched trace fetch {source}`"
            )
    try:
        with console.status(f"reading {escape(path.name)}"):
            trace = read_trace(
                path,
                seed=seed,
                num_requests=num_requests,
                start_s=start_s,
                duration_s=math.inf if duration_s is None else duration_s,
                skip_bad=skip_bad,
            )
    except OSError as error:
        raise TraceError(
            f"no trace {source!r}{meant(source, (*KINDS, *PUBLIC_TRACES))}: neither a file that "
            f"can be read ({error.strerror}) nor one of the kinds to synthesize "
            f"({', '.join(KINDS)}) or the public traces (`slosched trace fetch` lists them)"
        ) from error
    for oddity in _oddities(trace):
        console.print(f"[yellow]note:[/] {escape(path.name)}: {escape(oddity)}")
    return trace


def _is_there(path: Path) -> bool:
    """Tell whether a trace can be read there, which a folder cannot be."""
    return path.exists() and not path.is_dir()


def has_slos(trace: Trace) -> bool:
    """Tell whether any request of a trace brings an SLO of its own."""
    return any(request.slo != NO_SLO for request in trace.requests)


def note_own_slos(trace: Trace) -> None:
    """Print a note that the requests of a trace are judged by the SLOs that it has for them."""
    console.print(
        f"[yellow]note:[/] each request is judged by its own SLO, which {escape(trace.name)} has; "
        "--slo-ttft and --slo-tpot give all of them another"
    )


def described(trace: Trace) -> str:
    """Return how many requests of which trace come how fast: `60 requests of poisson at 2/s`.

    Requests that all come at once have no rate.
    """
    rate = f" at {trace.rate:.3g}/s" if math.isfinite(trace.rate) else ""
    return f"{len(trace)} request{'s' if len(trace) > 1 else ''} of {trace.name}{rate}"


def note_nothing_promised() -> None:
    """Print a note that every finished request is good, as no request has an SLO."""
    console.print(
        "[yellow]note:[/] no request was promised a time, so every finished one is good: "
        "promise something, for example with --slo-ttft 1s --slo-tpot 50ms"
    )


def _oddities(trace: Trace) -> list[str]:
    """Return a text for each way in which rows were changed or left out while reading."""
    noted = trace.provenance
    said = []
    if noted.get("rows_out_of_order"):
        said.append(f"{noted['rows_out_of_order']:,} rows not in order of time: sorted")
    if noted.get("rows_before_zero"):
        said.append(
            f"{noted['rows_before_zero']:,} arrivals before 0 s: all shifted, the first is at 0"
        )
    if noted.get("rows_left_out"):
        said.append(f"{noted['rows_left_out']:,} rows left out ({noted['rows_left_out_are']})")
    if noted.get("rows_bad"):
        said.append(f"{noted['rows_bad']:,} bad rows skipped ({noted['rows_bad_are']})")
    return said
