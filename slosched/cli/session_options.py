"""Options for sessions: whether turns wait for each other, and what a whole session is promised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from slosched.workload import Trace, TTFTPromise, parse_duration, parse_ttft


def _tpot(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _program(text: str) -> TTFTPromise:
    """Return the base and the factor of "10m", "1.5x" or "1m+1.5x"."""
    try:
        return parse_ttft(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not TIME, FACTORx or TIME+FACTORx, as in 10m, 1.5x or 1m+1.5x ({error})"
        ) from error


@dataclass(frozen=True)
class SessionOptions:
    """The options for the sessions of a trace."""

    closed_loop: Annotated[
        float | None,
        typer.Option(
            parser=_tpot,
            metavar="TPOT",
            help="Let each turn of a session wait for the end of the turn before it.  The pause "
            "between the two is what the trace's gap leaves if the answer before took this time "
            "for each token: 30ms.  Default: requests arrive at the trace's times, except for "
            "turns that have a column think_s, as those of the kind agents.",
        ),
    ] = None
    slo_program: Annotated[
        TTFTPromise | None,
        typer.Option(
            parser=_program,
            metavar="TIME|FACTORx",
            help="Time to promise for a whole session, beside the pauses between its turns: 10m; "
            "1.5x for 1.5 times what its turns may take by their TTFT and TPOT; 1m+1.5x for their "
            "sum.",
        ),
    ] = None

    def with_closed_loop(self, trace: Trace) -> Trace:
        """Return the trace with its turns waiting for each other, if that is asked for."""
        return trace if self.closed_loop is None else trace.closed_loop(self.closed_loop)

    def with_program_deadlines(self, trace: Trace) -> Trace:
        """Return the trace with what is promised for its sessions, if anything is."""
        promise = self.slo_program
        if promise is None:
            return trace
        return trace.with_program_deadlines(promise.base_s, promise.prefill_factor)
