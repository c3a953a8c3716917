"""`slosched top`: queue, goodput, attainment and latencies of a running server."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from slosched.cli import options
from slosched.cli.console import console, table
from slosched.cli.live_metrics import NoMetricsError, Span, read_metrics
from slosched.metrics.page import Snapshot

_UNKNOWN = "–"
_COUNTED = {
    "promise": ("slosched:promises_total", "slosched:promises_kept_total"),
    "tier": ("slosched:tier_requests_ended_total", "slosched:tier_good_requests_total"),
    "tenant": ("slosched:tenant_requests_ended_total", "slosched:tenant_good_requests_total"),
}
"""By label, the counter of what was promised, and that of what was kept."""


def top(
    url: Annotated[
        str,
        typer.Argument(
            callback=options.server_url, help="Address of the server: http://127.0.0.1:8000."
        ),
    ] = "http://127.0.0.1:8000",
    window: Annotated[
        float,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="Count what happened in this time: 10s.",
        ),
    ] = options.Seconds(30),
    interval: Annotated[
        float,
        typer.Option(
            parser=options.duration, metavar="TIME", help="Time between two looks: 500ms."
        ),
    ] = options.Seconds(1),
    once: Annotated[
        bool,
        typer.Option("--once", help="Print what happened since the server started, and end."),
    ] = False,
) -> None:
    """Watch a running server: queue, KV cache, goodput, attainment, latencies, rejections.

    Attainment is by promise, and by tier and tenant on a server that has some.

    The numbers come from `/metrics`, which needs no API key.  vLLM's server works as well; a dash
    stands where it does not know a number.  Ctrl-C ends the command.

    Examples:

    - `slosched top http://127.0.0.1:8000 --window 10s`
    - for a script: `slosched top --once`
    """
    newest = read_metrics(url)
    if once:
        console.print(_frame(_since_start(newest), url, "since its start"))
        return
    _watch(url, newest, window, interval)


def _watch(url: str, newest: Snapshot, window_s: float, interval_s: float) -> None:
    """Show a frame after each look, until Ctrl-C."""
    seen = deque([newest])
    with Live(_frame(_since_start(newest), url, "since its start"), console=console) as live:
        try:
            while True:
                time.sleep(interval_s)
                try:
                    newest = read_metrics(url)
                except NoMetricsError as error:
                    live.update(escape(str(error)))
                    continue
                if newest.started_s != seen[-1].started_s:  # its counters began again at zero
                    seen.clear()
                seen.append(newest)
                while len(seen) > 2 and newest.time_s - seen[1].time_s >= window_s:
                    seen.popleft()
                span = Span(seen[0], newest) if len(seen) > 1 else _since_start(newest)
                live.update(_frame(span, url, f"in the last {span.duration_s:.0f} s"))
        except KeyboardInterrupt:
            return


def _since_start(now: Snapshot) -> Span:
    """Return the time from the start of the server, when all counters were zero."""
    return Span(Snapshot(now.time_s if now.started_s is None else now.started_s), now)


def _frame(span: Span, url: str, when: str) -> Table:
    return table(url, ("", when), _rows(span))


def _rows(span: Span) -> Iterator[tuple[str, str]]:
    now = span.now
    for name, metric in (
        ("running", "vllm:num_requests_running"),
        ("waiting", "vllm:num_requests_waiting"),
        ("swapped", "slosched:num_requests_swapped"),
    ):
        yield name, _spelt(now.total(metric), "{:.0f}".format)
    yield "KV cache in use", _spelt(now.mean("vllm:kv_cache_usage_perc"), "{:.1%}".format)
    good = span.growth("slosched:good_requests_total")
    rate = None if good is None or span.duration_s <= 0 else good / span.duration_s
    yield "good requests/s", _spelt(rate, "{:.2f}".format)
    yield from _attainment(span)
    for name, metric in (
        ("TTFT", "vllm:time_to_first_token_seconds"),
        ("TPOT", "vllm:request_time_per_output_token_seconds"),
    ):
        for share in (0.5, 0.99):
            yield f"{name} p{share * 100:.0f}", _spelt(span.quantile(metric, share), _milliseconds)
    for reason, count in span.growth_by_label("vllm:admission_rejections_total", "reason").items():
        if count:
            yield f"rejected: {reason}", f"{count:.0f}"


def _attainment(span: Span) -> Iterator[tuple[str, str]]:
    """Yield the attainment of each promise, of each tier and of each tenant."""
    for label, (promised, kept) in _COUNTED.items():
        num_kept = span.growth_by_label(kept, label)
        for name, number in span.growth_by_label(promised, label).items():
            what = name.upper() if label == "promise" else f"{label} {name}"
            share = num_kept[name] / number if number else None
            yield f"{what} attainment", _spelt(share, "{:.1%}".format)


def _spelt(value: float | None, spell: Callable[[float], str]) -> str:
    return _UNKNOWN if value is None else spell(value)


def _milliseconds(seconds: float) -> str:
    return "beyond the buckets" if math.isinf(seconds) else f"{seconds * 1000:.1f} ms"
