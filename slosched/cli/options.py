"""Options that several commands share, with the functions that read their values."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from slosched.cli.session_options import SessionOptions
from slosched.cli.trace_source import has_slos, make_up, note_own_slos, read_part
from slosched.core import NO_SLO, SLO, DeadlineRule, LatencyModel, Limits, PreemptionMode
from slosched.kv import Eviction, HostWrites, PrefixCaching, PrefixHost
from slosched.workload import (
    KINDS,
    Adapters,
    Priorities,
    Proportional,
    SLORule,
    Tiers,
    Trace,
    TTFTPromise,
    named_slo,
    parse_adapters,
    parse_duration,
    parse_priority,
    parse_tier,
    parse_ttft,
)


def duration(text: str) -> float:
    """Return seconds; raise BadParameter, which typer shows with the option's name."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def ttft(text: str) -> TTFTPromise:
    """Return a TTFT promise; raise BadParameter, which typer shows with the option's name."""
    try:
        return parse_ttft(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def adapters(text: str) -> Adapters:
    """Return LoRA adapters; raise BadParameter, which typer shows with the option's name."""
    try:
        return parse_adapters(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _priorities(texts: list[str] | None) -> list[str] | None:
    """Return the texts; raise BadParameter if they do not make valid `Priorities`."""
    try:
        Priorities(tuple(map(parse_priority, texts or ())))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return texts


class Seconds(float):
    """A default value in seconds that help texts show with its unit."""

    def __str__(self) -> str:
        return f"{self:g}s"


def share(text: str) -> float:
    """Return a share in (0, 1]; raise BadParameter for anything else, such as percent."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise typer.BadParameter(f"{text!r} is no share in (0, 1], as 0.9 for 90 %")
    return value


def writable(path: Path | None) -> Path | None:
    """Return the path; raise BadParameter if it cannot be written, before any work is done."""
    if path is None:
        return None
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise typer.BadParameter(f"{str(path)!r} is in no folder: {nearest} exists and is a file")
    if not os.access(path if path.exists() else nearest, os.W_OK):
        raise typer.BadParameter(f"{str(path)!r} cannot be written: no permission in {nearest}")
    return path


def out_file(what: str) -> Any:
    """Return the option --out for the file that a command writes; `what` is its help text."""
    return typer.Option("--out", "-o", dir_okay=False, callback=writable, help=what)


def is_given(context: typer.Context, name: str) -> bool:
    """Tell whether the user gave this option on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


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


class Format(StrEnum):
    """The source of a model's weights: its files (auto) or random numbers (dummy)."""

    AUTO = "auto"
    DUMMY = "dummy"


TTFT = Annotated[
    float | None,
    typer.Option(
        "--slo-ttft",
        parser=duration,
        callback=_one_promise,
        metavar="TIME",
        help="TTFT to promise: 500ms, 1s, 0.5.",
    ),
]
TPOT = Annotated[
    float | None,
    typer.Option(
        "--slo-tpot",
        parser=duration,
        callback=_one_promise,
        metavar="TIME",
        help="TPOT to promise: 50ms, 0.05.",
    ),
]
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
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random numbers: 7.")]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        "-p",
        metavar="NAME[:option=value,…][+WRAPPER…]",
        help="Scheduling policy: edf:drop=expired.  `slosched policies` lists all.",
    ),
]
LatencyModelName = Annotated[
    str | None,
    typer.Option(
        "--latency-model",
        metavar="FILE|NAME",
        help="A latency model that `slosched fit` saved (model.json), or a bundled one "
        "(h100/llama-3.1-8b; `slosched profile --list` shows all).",
    ),
]
OutDir = Annotated[
    Path,
    typer.Option("--out", "-o", file_okay=False, callback=writable, help="Folder for the results."),
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

    slo_ttft: Annotated[
        TTFTPromise | None,
        typer.Option(
            "--slo-ttft",
            parser=ttft,
            callback=_one_promise,
            metavar="TIME|FACTORx",
            help="TTFT to promise: 500ms, 1s; 3x for three times what the latency model predicts "
            "for the prompt's prefill alone; 0.5s+3x for their sum.",
        ),
    ] = None
    slo_tpot: Annotated[
        float | None,
        typer.Option(
            "--slo-tpot",
            parser=duration,
            callback=_one_promise,
            metavar="TIME",
            help="TPOT to promise: 50ms, 0.05.",
        ),
    ] = None
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

    def open(
        self, source: str, slo: SLO | SLORule | None, seed: int, *, keeps_slos: bool = False
    ) -> Trace:
        """Return the trace of a file, public name or kind; `slo` replaces the SLOs in the file.

        With `keeps_slos` it replaces none: a file that has any is left as it is, and a note says
        so.
        """
        trace = self._made_up(source, seed) if _is_kind(source) else self._read(source, seed)
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
        elif slo is not None:
            trace = trace.with_slo(slo)
        return self.with_program_deadlines(trace)

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


def _is_kind(source: str) -> bool:
    return source in KINDS and not Path(source).exists()


@dataclass(frozen=True)
class LimitOptions:
    """The options for a scheduler's limits, and the deadline rule of policy and metrics."""

    deadline_rule: Annotated[
        DeadlineRule,
        typer.Option(
            help="The rule for when a token is on time, for both the policy and the metrics."
        ),
    ] = DeadlineRule.MEAN_TPOT
    preemption: Annotated[
        PreemptionMode,
        typer.Option(
            help="What happens to the KV cache of a preempted request: it is computed again or "
            "swapped to host memory."
        ),
    ] = PreemptionMode.RECOMPUTE
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in one step.")] = (
        2048
    )
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests that run at once.")] = 256

    def limits(self) -> Limits:
        return Limits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            preemption_mode=self.preemption,
            deadline_rule=self.deadline_rule,
        )


PrefixCache = Annotated[
    PrefixCaching,
    typer.Option(
        help="Whether prompts with a common prefix share KV blocks, also with requests that have "
        "ended.  hash finds prefixes by block hashes, as in vLLM; merged does, too, and merges "
        "equal blocks, as in vLLM V0; radix uses a radix tree, as in SGLang."
    ),
]
PrefixCacheEviction = Annotated[
    Eviction,
    typer.Option(
        help="What --prefix-cache hash evicts first when it needs room.  lru: what was left "
        "longest ago, as in vLLM; ttl: what has outlived the time for which it was worth its "
        "memory, as in Continuum; tail_lru: tails that a turn can do without; saved_time: what is "
        "likely to save the least device time; belady: what is used again last, in the simulator "
        "alone."
    ),
]
PrefixHostTokens = Annotated[
    int,
    typer.Option(
        min=0,
        help="Tokens of host memory for KV blocks that --prefix-cache evicts from the device: "
        "100000.  When a prompt needs them again, they are copied back.",
    ),
]
PrefixHostWrites = Annotated[
    HostWrites,
    typer.Option(
        help="When blocks are copied to the host memory of --prefix-host-tokens: as the device "
        "evicts them, or as soon as they are computed."
    ),
]


def prefix_host(
    prefix_cache: PrefixCaching, num_tokens: int, writes: HostWrites, block_size: int
) -> PrefixHost:
    """Return the host memory of the prefix cache; ValueError if there is no prefix cache for it."""
    if num_tokens and prefix_cache is PrefixCaching.OFF:
        raise ValueError(
            "--prefix-host-tokens keeps what a prefix cache evicts: choose one with "
            "--prefix-cache hash, merged or radix"
        )
    return PrefixHost(_blocks("--prefix-host-tokens", num_tokens, block_size), writes)


_MAX_BLOCKS = 2**26
"""A billion tokens in blocks of 16, which is more than any device holds. A list of more blocks
would take gigabytes."""


def _blocks(option: str, num_tokens: int, block_size: int) -> int:
    """Return the whole KV blocks in `num_tokens`; raise ValueError above `_MAX_BLOCKS`."""
    num_blocks = num_tokens // block_size
    if num_blocks > _MAX_BLOCKS:
        raise ValueError(
            f"{option} {num_tokens} takes {num_blocks:,} KV blocks of {block_size} tokens; "
            f"give at most {_MAX_BLOCKS * block_size}"
        )
    return num_blocks


@dataclass(frozen=True)
class KVOptions:
    """The options for the size of the KV cache."""

    kv_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens that the KV cache holds: 100000.  Default: what memory allows."
        ),
    ] = None
    host_kv_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens of KV cache in host memory, for --preemption swap: 100000."
        ),
    ] = 0
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in one KV block.")] = 16

    @property
    def num_host_blocks(self) -> int:
        return _blocks("--host-kv-tokens", self.host_kv_tokens, self.block_size)

    def num_blocks(self, default_tokens: int) -> int:
        """Return the number of KV blocks, which hold `default_tokens` if no size was given."""
        tokens = default_tokens if self.kv_tokens is None else self.kv_tokens
        if tokens < self.block_size:
            raise ValueError(
                f"a KV cache of {tokens} tokens does not hold one block of {self.block_size}: "
                "raise --kv-tokens or lower --block-size"
            )
        return _blocks("--kv-tokens", tokens, self.block_size)


@dataclass(frozen=True)
class ModelOptions:
    """The options for the model and the device that it runs on."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="smollm2-135m (comes with slosched), tiny-random, a local directory, or a Hugging "
            "Face id.",
        ),
    ] = "smollm2-135m"
    device: Annotated[
        str, typer.Option(help="Device that runs the model: auto, cpu, cuda or cuda:1.")
    ] = "auto"
    dtype: Annotated[
        str, typer.Option(help="Type of the weights: auto, float32, bfloat16 or float16.")
    ] = "auto"
    load_format: Annotated[
        Format,
        typer.Option(help="auto loads the weights; dummy makes random ones of the same shapes."),
    ] = Format.AUTO
    attention: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Kernels that compute attention: sdpa, triton, flash-attn, vllm-flash-attn, …  "
            "auto takes the best that is there; `slosched doctor` lists all.",
        ),
    ] = "auto"
    graph_sizes: Annotated[
        str,
        typer.Option(
            metavar="auto|none|NUM,…",
            help="Numbers of decodes to which a step of decodes alone is padded, to be replayed as "
            "a CUDA graph: 1,2,4,8, or vllm:64 (vLLM's up to 64).  auto takes those of vLLM on a "
            "GPU whose --attention can be captured, else none.  A CPU pads to those given and "
            "captures nothing.",
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads that torch uses: 2.  Default: torch's own choice."),
    ] = None
