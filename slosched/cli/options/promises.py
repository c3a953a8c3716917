"""The options for SLOs: one for all requests, or a rule for those of a trace."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from slosched.cli.options.values import is_given, promised, ttft
from slosched.core import NO_SLO, SLO, LatencyModel
from slosched.workload import Proportional, SLORule, Tiers, TTFTPromise, named_slo, parse_tier


def _one_promise(context: typer.Context, value: Any) -> Any:
    """Return the value; raise BadParameter if SLOs are given in two ways: times, tiers or a name.

    It is the callback of all these options, as each sees only those that come before it on the
    command line.
    """
    names = ("slo_ttft", "slo_tpot")
    times = [f"--{name}".replace("_", "-") for name in names if is_given(context, name)]
    if times and is_given(context, "slo_tier"):
        raise typer.BadParameter(f"a tier has both times itself; leave out {' and '.join(times)}")
    others = times + ["--slo-tier"] * is_given(context, "slo_tier")
    if others and is_given(context, "slo_name"):
        raise typer.BadParameter(f"--slo names both times itself; leave out {' and '.join(others)}")
    return value


def _named(text: str) -> str:
    """Return the name of an SLO; raise BadParameter, which lists the names, for any other text."""
    try:
        named_slo(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return text


TTFT = Annotated[
    float | None,
    typer.Option(
        "--slo-ttft",
        parser=promised,
        callback=_one_promise,
        metavar="TIME",
        help="TTFT to promise: 500ms, 1s, 0.5.",
    ),
]


def _tpot(more: str = "") -> Any:
    """Return the option --slo-tpot with `more` in its help."""
    return typer.Option(
        "--slo-tpot",
        parser=promised,
        callback=_one_promise,
        metavar="TIME",
        help="TPOT to promise: 50ms, 0.05." + more,
    )


def _trace_ttft(more: str) -> Any:
    """Return the option --slo-ttft of a trace with `more` in its help."""
    return typer.Option(
        "--slo-ttft",
        parser=ttft,
        callback=_one_promise,
        metavar="TIME|FACTORx",
        help="TTFT to promise: 500ms, 1s; 3x for three times what the latency model predicts "
        "for the prompt's prefill alone; 0.5s+3x for their sum." + more,
    )


_NO_TPOT = "  Without --slo-tpot, no TPOT is promised."
_NO_TTFT = "  Without --slo-ttft, no TTFT is promised."
USUAL_SLO = SLO(1.0, 0.05)
"""What commands that need some promise make if they are given none."""

TPOT = Annotated[float | None, _tpot()]
SLOName = Annotated[
    str | None,
    typer.Option(
        "--slo",
        parser=_named,
        callback=_one_promise,
        metavar="NAME",
        help="Instead of --slo-ttft and --slo-tpot: the limits of an MLPerf Inference benchmark, "
        "of which it wants 99 % kept: mlperf-llama3.1-8b-server.  `--slo list` names all.",
    ),
]


@dataclass(frozen=True)
class PromiseOptions:
    """The SLO options of `serve`: the same promise for every request."""

    slo_ttft: TTFT = None
    slo_tpot: TPOT = None
    slo_name: SLOName = None

    def slo(self) -> SLO | None:
        """Return the SLO, or None if nothing was given."""
        if self.slo_name:
            return named_slo(self.slo_name)
        if self.slo_ttft is None and self.slo_tpot is None:
            return None
        return SLO(self.slo_ttft or NO_SLO.ttft_s, self.slo_tpot or NO_SLO.tpot_s)


@dataclass(frozen=True)
class TracePromiseOptions:
    """The SLO options for a trace: one promise for all, tiers, or a TTFT by prompt length."""

    slo_ttft: Annotated[TTFTPromise | None, _trace_ttft(_NO_TPOT)] = None
    slo_tpot: Annotated[float | None, _tpot(_NO_TTFT)] = None
    slo_tier: Annotated[
        list[str] | None,
        typer.Option(
            callback=_one_promise,
            metavar="[NAME=]WEIGHT:TTFT/TPOT",
            help="Instead of --slo-ttft and --slo-tpot: a tier of requests, drawn at random by "
            "weight: 0.3:1s/50ms, or gold=0.3:1s/50ms.  May be repeated.",
        ),
    ] = None
    slo_name: SLOName = None

    def rule(self, model: LatencyModel | None, seed: int) -> SLO | SLORule | None:
        """Return the SLO or the rule to give to `TraceOptions.open`; None if nothing is promised.

        Raise ValueError for a promise in prefill times if there is no model to predict them.
        """
        if self.slo_name:
            return named_slo(self.slo_name)
        if self.slo_tier:
            weights, slos, names = zip(*map(parse_tier, self.slo_tier), strict=True)
            return Tiers(slos, weights, seed, names if any(names) else ())
        ttft = self.slo_ttft
        if ttft is None or not ttft.prefill_factor:
            return self.fixed()
        if model is None:
            raise ValueError(
                f"--slo-ttft {ttft} is in prefill times: name the device with --latency-model, "
                "or give a time"
            )
        tpot_s = self.slo_tpot or NO_SLO.tpot_s
        return Proportional(model.predict_prefill, ttft.prefill_factor, tpot_s, ttft.base_s)

    def is_given(self, context: typer.Context) -> bool:
        """Tell whether the user asked for a promise, and did not leave the command its default."""
        return any(is_given(context, option.name) for option in fields(self))

    def fixed(self) -> SLO | None:
        """Return the one SLO for all requests; None if no time was given.

        Raise ValueError for tiers and prefill times, which only the requests of a trace can have.
        """
        if self.slo_name:
            return named_slo(self.slo_name)
        ttft = self.slo_ttft or TTFTPromise()
        if self.slo_tier or ttft.prefill_factor:
            raise ValueError(
                "tiers and multiples of the prefill time are for the requests of a trace; "
                "give --slo-ttft and --slo-tpot as times"
            )
        return PromiseOptions(ttft.base_s or None, self.slo_tpot).slo()


@dataclass(frozen=True)
class UsualPromiseOptions(TracePromiseOptions):
    """The same options of commands that promise `USUAL_SLO` if nothing else is promised."""

    slo_ttft: Annotated[
        TTFTPromise | None, _trace_ttft(_NO_TPOT + "  Default without both: 1s and 50ms.")
    ] = None
    slo_tpot: Annotated[
        float | None, _tpot(_NO_TTFT + "  Default without both: 50ms and a TTFT of 1s.")
    ] = None

    def fixed(self) -> SLO:
        """Return the one SLO for all requests, `USUAL_SLO` if no time was given.

        Raise ValueError for tiers and prefill times, as the other options do.
        """
        return super().fixed() or USUAL_SLO
