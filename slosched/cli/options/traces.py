"""The options that choose a trace, and change its rate, lengths and labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from slosched.cli.options.values import adapters, duration
from slosched.cli.session_options import SessionOptions
from slosched.cli.trace_source import has_slos, is_kind, make_up, note_own_slos, read_part
from slosched.core import SLO, OnInfeasible
from slosched.workload import KINDS, Adapters, Priorities, SLORule, Trace, parse_priority

TraceSource = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="FILE|NAME|KIND",
        help="A trace file (Azure, BurstGPT, Mooncake, ShareGPT, …; see docs/how-to/traces.md), "
        "a public trace that was fetched (`slosched trace fetch`), or one to make up: "
        f"{', '.join(KINDS)}.",
    ),
]
_MOST_REQUESTS = 1_000_000_000  # more do not fit into any memory
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random numbers: 7.")]


def _priorities(texts: list[str] | None) -> list[str] | None:
    """Return the texts; raise BadParameter if they do not make valid `Priorities`."""
    try:
        Priorities(tuple(map(parse_priority, texts or ())))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return texts


@dataclass(frozen=True)
class TraceOptions(SessionOptions):
    """Options that choose a part of a trace, and change its rate, lengths and labels."""

    rate: Annotated[
        float | None,
        typer.Option(
            help="Offered rate in requests/s, by scaling all gaps between arrivals: 2.5.  "
            "Default: the trace's own rate."
        ),
    ] = None
    thin_to: Annotated[
        float | None,
        typer.Option(
            help="Offered rate in requests/s, by leaving out requests at random: 2.  Applied after "
            "--rate."
        ),
    ] = None
    poisson: Annotated[
        bool,
        typer.Option(
            "--poisson",
            help="Keep requests and mean rate, but let them arrive as a Poisson process.",
        ),
    ] = False
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--num-requests",
            "-n",
            min=1,
            max=_MOST_REQUESTS,
            help="Use only the first requests: 500.  Default: all of a file, 200 of a made-up "
            "trace; for each window of `capacity` 3000, of `tune` 1400.",
        ),
    ] = None
    start: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="TIME",
            help="Use only requests that arrive from this time on: 10m.",
        ),
    ] = None
    duration: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="TIME",
            help="Use only requests that arrive within this time after the start: 1h.",
        ),
    ] = None
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Leave out rows that cannot be read, and print how many."),
    ] = False
    cv: Annotated[
        float | None,
        typer.Option(
            help="Burstiness of made-up gamma and weibull arrivals, as the coefficient of "
            "variation of the gaps: 2."
        ),
    ] = None
    length_scale: Annotated[
        float,
        typer.Option(
            help="Factor on the lengths of all prompts and outputs: 0.125 fits a data centre's "
            "trace to a laptop."
        ),
    ] = 1.0
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Shorten longer prompts to this: 4096.")
    ] = None
    max_output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Shorten longer outputs to this: 512.")
    ] = None
    priority: Annotated[
        # Parsed later: typer has no lists of parsed values such as `PriorityShare`.
        list[str] | None,
        typer.Option(
            callback=_priorities,
            metavar="SHARE:PRIORITY",
            help="Give a random share of the requests a priority: 0.2:-1.  Lower ones are served "
            "first, all others get 0.  May be repeated.  Default: the trace's own priorities.",
        ),
    ] = None
    loras: Annotated[
        Adapters | None,
        typer.Option(
            parser=adapters,
            metavar="NUM[:SKEW]",
            help="Give every request one of this many LoRA adapters: 8, or 32:1 to draw them by "
            "Zipf's law.  Default: the trace's own adapters.",
        ),
    ] = None
    on_infeasible: Annotated[
        OnInfeasible | None,
        typer.Option(
            help="What becomes of a request whose SLO the policy cannot keep: it is rejected, "
            "served without an SLO (relegate), which does not count as good, or served late.  "
            "Default: the trace's own choice, or reject; with --slo-program, the turns behind a "
            "session's first are relegated, since a late turn need not make the session late.",
        ),
    ] = None

    def open(
        self, source: str, slo: SLO | SLORule | None, seed: int, *, keeps_slos: bool = False
    ) -> Trace:
        """Return the trace of a file, public name or kind; `slo` replaces the SLOs in the file.

        With `keeps_slos` it replaces none: a file that has any is left as it is, and a note says
        so.
        """
        trace = self._made_up(source, seed) if is_kind(source) else self._read(source, seed)
        trace = self.with_closed_loop(trace)
        if self.thin_to is not None:
            trace = trace.thinned_to(self.thin_to, seed)
        if self.poisson:
            trace = trace.with_poisson_arrivals(seed=seed)
        if self.length_scale != 1.0:
            trace = trace.with_lengths_scaled(self.length_scale)
        trace = trace.clipped(self.max_prompt_tokens, self.max_output_tokens).trace
        if self.priority:
            shares = tuple(map(parse_priority, self.priority))
            trace = trace.with_priorities(Priorities(shares, seed))
        if self.loras is not None:
            trace = trace.with_adapters(replace(self.loras, seed=seed))
        if keeps_slos and has_slos(trace):
            note_own_slos(trace)
            slo = None
        return self.promised(trace, slo)

    def promised(self, trace: Trace, slo: SLO | SLORule | None) -> Trace:
        """Return the trace with `slo`, if any, and with what is promised for its sessions.

        A program's time may depend on the SLOs of its turns, so these come first.
        """
        if slo is not None:
            trace = trace.with_slo(slo)
        trace = self.with_program_deadlines(trace)
        return trace if self.on_infeasible is None else trace.with_on_infeasible(self.on_infeasible)

    def _made_up(self, kind: str, seed: int) -> Trace:
        if self.start is not None:
            raise ValueError(f"--start is for files; nothing of {kind!r} exists before it is asked")
        return make_up(kind, self.num_requests, self.duration, self.rate, self.cv, seed)

    def _read(self, source: str, seed: int) -> Trace:
        start_s = self.start or 0.0
        trace = read_part(source, self.num_requests, start_s, self.duration, self.skip_bad, seed)
        if self.cv is not None:
            raise ValueError(f"--cv is for made-up arrivals; {source!r} has its own")
        return trace if self.rate is None else trace.scaled_to(self.rate)
