"""Options that several commands share, and what they mean."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from slosched.cli.trace_source import make_up, read_part
from slosched.core import NO_SLO, SLO, DeadlineRule, LatencyModel, Limits, PreemptionMode
from slosched.kv import HostWrites, PrefixCaching, PrefixHost
from slosched.workload import (
    KINDS,
    Adapters,
    Priorities,
    Proportional,
    SLORule,
    Tiers,
    Trace,
    TTFTPromise,
    parse_adapters,
    parse_duration,
    parse_priority,
    parse_tier,
    parse_ttft,
)


def duration(text: str) -> float:
    """Seconds; a complaint that typer shows beside the option's name."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def ttft(text: str) -> TTFTPromise:
    """A TTFT promise; a complaint that typer shows beside the option's name."""
    try:
        return parse_ttft(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def adapters(text: str) -> Adapters:
    """LoRA adapters; a complaint that typer shows beside the option's name."""
    try:
        return parse_adapters(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _priorities(texts: list[str] | None) -> list[str] | None:
    """Complains of what `Priorities` refuses."""
    try:
        Priorities(tuple(map(parse_priority, texts or ())))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return texts


class Seconds(float):
    """A default that help texts show with its unit."""

    def __str__(self) -> str:
        return f"{self:g}s"


def share(text: str) -> float:
    """A share of requests; whoever means percent is told so."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise typer.BadParameter(f"{text!r} is no share in (0, 1], as 0.9 for 90 %")
    return value


def writable(path: Path | None) -> Path | None:
    """Complains where nothing can be written, before the work and not after it."""
    if path is None:
        return None
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise typer.BadParameter(f"{str(path)!r} is in no folder: {nearest} exists and is a file")
    if not os.access(path if path.exists() else nearest, os.W_OK):
        raise typer.BadParameter(f"{str(path)!r} cannot be written: no permission in {nearest}")
    return path


def out_file(what: str) -> Any:
    """The option for the file that a command writes."""
    return typer.Option("--out", "-o", dir_okay=False, callback=writable, help=what)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _one_promise(context: typer.Context, value: Any) -> Any:
    """Complains of tiers beside what they replace.

    It is asked of all three, for each sees only those that stand before it on the command line.
    """
    names = ("slo_ttft", "slo_tpot")
    times = [f"--{name}".replace("_", "-") for name in names if is_given(context, name)]
    if times and is_given(context, "slo_tier"):
        raise typer.BadParameter(f"a tier has both times itself; leave out {' and '.join(times)}")
    return value


class Format(StrEnum):
    """What is loaded of a model."""

    AUTO = "auto"
    DUMMY = "dummy"


TTFT = Annotated[
    float | None,
    typer.Option(
        "--slo-ttft", parser=duration, metavar="TIME", help="TTFT promise: 500ms, 1s, 0.5."
    ),
]
TPOT = Annotated[
    float | None,
    typer.Option("--slo-tpot", parser=duration, metavar="TIME", help="TPOT promise: 50ms, 0.05."),
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
Seed = Annotated[int, typer.Option(min=0, help="Of everything that is random.")]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        "-p",
        metavar="NAME[:option=value,…][+WRAPPER…]",
        help="See `slosched policies`.",
    ),
]
LatencyModelName = Annotated[
    str | None,
    typer.Option(
        "--latency-model",
        metavar="FILE|NAME",
        help="A model that `slosched fit` saved, or a bundled one.",
    ),
]
OutDir = Annotated[
    Path,
    typer.Option("--out", "-o", file_okay=False, callback=writable, help="Folder for results."),
]


@dataclass(frozen=True)
class PromiseOptions:
    """What requests are promised, the same to all."""

    slo_ttft: TTFT = None
    slo_tpot: TPOT = None

    def slo(self) -> SLO | None:
        """None if neither was given."""
        if self.slo_ttft is None and self.slo_tpot is None:
            return None
        return SLO(self.slo_ttft or NO_SLO.ttft_s, self.slo_tpot or NO_SLO.tpot_s)


@dataclass(frozen=True)
class TracePromiseOptions:
    """What the requests of a trace are promised: all the same, by tier, or by their prompts."""

    slo_ttft: Annotated[
        TTFTPromise | None,
        typer.Option(
            "--slo-ttft",
            parser=ttft,
            callback=_one_promise,
            metavar="TIME|FACTORx",
            help="TTFT promise: 500ms, 1s; 3x is three times the prompt's unloaded prefill, by the "
            "latency model; 0.5s+3x their sum.",
        ),
    ] = None
    slo_tpot: Annotated[
        float | None,
        typer.Option(
            "--slo-tpot",
            parser=duration,
            callback=_one_promise,
            metavar="TIME",
            help="TPOT promise: 50ms, 0.05.",
        ),
    ] = None
    slo_tier: Annotated[
        list[str] | None,
        typer.Option(
            callback=_one_promise,
            metavar="WEIGHT:TTFT/TPOT",
            help="Instead of the two: tiers drawn at random by weight, as 0.3:1s/50ms.  Repeat.",
        ),
    ] = None

    def rule(self, model: LatencyModel | None, seed: int) -> SLO | SLORule | None:
        """What to give to `TraceOptions.open`: None if nothing is promised.

        Raises ValueError for a promise in prefill times where there is no model to tell them.
        """
        if self.slo_tier:
            weights, slos = zip(*map(parse_tier, self.slo_tier), strict=True)
            return Tiers(slos, weights, seed)
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

    def fixed(self) -> SLO | None:
        """The promise that is the same to all, for what is not a trace; ValueError if none is."""
        ttft = self.slo_ttft or TTFTPromise()
        if self.slo_tier or ttft.prefill_factor:
            raise ValueError(
                "tiers and multiples of the prefill time are for the requests of a trace; "
                "give --slo-ttft and --slo-tpot as times"
            )
        return PromiseOptions(ttft.base_s or None, self.slo_tpot).slo()


@dataclass(frozen=True)
class TraceOptions:
    """Which part of a trace is used, and what is done to it before."""

    rate: Annotated[
        float | None,
        typer.Option(help="Requests/s, by time compression.  Default: the trace's own."),
    ] = None
    thin_to: Annotated[
        float | None,
        typer.Option(help="Requests/s, by leaving out requests at random; after --rate."),
    ] = None
    poisson: Annotated[
        bool, typer.Option("--poisson", help="Same requests and mean rate, Poisson arrivals.")
    ] = False
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--num-requests",
            "-n",
            min=1,
            help="The first so many; no more are read (made up: 200).",
        ),
    ] = None
    start: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="TIME", help="Only what arrives from then on: 10m."),
    ] = None
    duration: Annotated[
        float | None,
        typer.Option(
            parser=duration, metavar="TIME", help="Only what arrives in so much time: 1h."
        ),
    ] = None
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Leave out rows that cannot be read, and say how many."),
    ] = False
    cv: Annotated[
        float | None,
        typer.Option(help="Burstiness of made-up gamma and weibull arrivals: CV of the gaps."),
    ] = None
    length_scale: Annotated[
        float,
        typer.Option(help="Multiply all lengths, as 0.125 for a laptop on a datacentre's trace."),
    ] = 1.0
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Clip longer prompts to this.")
    ] = None
    max_output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Clip longer outputs to this.")
    ] = None
    priority: Annotated[
        # `PriorityShare`, which typer takes no list of.
        list[str] | None,
        typer.Option(
            callback=_priorities,
            metavar="SHARE:PRIORITY",
            help="Give a random share of the requests a priority, lower served first: 0.2:-1.  "
            "Repeat; all others get 0.  Default: what the trace says.",
        ),
    ] = None
    loras: Annotated[
        Adapters | None,
        typer.Option(
            parser=adapters,
            metavar="NUM[:SKEW]",
            help="Give every request one of so many LoRA adapters: 8, or 32:1 for Zipf's law.  "
            "Default: what the trace says.",
        ),
    ] = None

    def open(self, source: str, slo: SLO | SLORule | None, seed: int) -> Trace:
        """The trace of a file, name or kind.  An SLO given replaces those in the file."""
        trace = self._made_up(source, seed) if _is_kind(source) else self._read(source, seed)
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
        return trace if slo is None else trace.with_slo(slo)

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
    """What bounds a step, and what policy and metric must agree on."""

    deadline_rule: Annotated[
        DeadlineRule,
        typer.Option(help="What makes a token on time, for policy and metric alike."),
    ] = DeadlineRule.MEAN_TPOT
    preemption: Annotated[
        PreemptionMode, typer.Option(help="What happens to the KV cache of a preempted request.")
    ] = PreemptionMode.RECOMPUTE
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one step.")] = 2048
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests running at once.")] = 256

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
        help="Whether prompts that begin alike share KV blocks, also those of requests that have "
        "ended: found by block hashes, as in vLLM, or in a radix tree, as in SGLang.  merged: by "
        "block hashes, but equal blocks become one, as in vLLM V0."
    ),
]
PrefixHostTokens = Annotated[
    int,
    typer.Option(
        min=0,
        help="Tokens in host memory for what --prefix-cache evicts from the device; found again "
        "they are copied back.",
    ),
]
PrefixHostWrites = Annotated[
    HostWrites,
    typer.Option(
        help="When --prefix-host-tokens are written: as the device evicts them, or as they are "
        "computed."
    ),
]


def prefix_host(
    prefix_cache: PrefixCaching, num_tokens: int, writes: HostWrites, block_size: int
) -> PrefixHost:
    """The host memory of the prefix cache, if there is one."""
    if num_tokens and prefix_cache is PrefixCaching.OFF:
        raise ValueError(
            "--prefix-host-tokens keeps what a prefix cache evicts: choose one with "
            "--prefix-cache hash, merged or radix"
        )
    return PrefixHost(_blocks("--prefix-host-tokens", num_tokens, block_size), writes)


_MAX_BLOCKS = 2**26
"""A billion tokens in blocks of 16: no device holds as much, and a list of all its blocks alone
takes gigabytes."""


def _blocks(option: str, num_tokens: int, block_size: int) -> int:
    """So many KV blocks; ValueError if they are more than could be kept book of."""
    num_blocks = num_tokens // block_size
    if num_blocks > _MAX_BLOCKS:
        raise ValueError(
            f"{option} {num_tokens} takes {num_blocks:,} KV blocks of {block_size} tokens; "
            f"give at most {_MAX_BLOCKS * block_size}"
        )
    return num_blocks


@dataclass(frozen=True)
class KVOptions:
    """How large the KV cache is."""

    kv_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that the KV cache holds.  Default: what memory allows."),
    ] = None
    host_kv_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of KV cache in host memory, for preemption by swap.")
    ] = 0
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in one KV block.")] = 16

    @property
    def num_host_blocks(self) -> int:
        return _blocks("--host-kv-tokens", self.host_kv_tokens, self.block_size)

    def num_blocks(self, default_tokens: int) -> int:
        """KV blocks of the cache; of `default_tokens` if no size was given."""
        tokens = default_tokens if self.kv_tokens is None else self.kv_tokens
        if tokens < self.block_size:
            raise ValueError(
                f"a KV cache of {tokens} tokens does not hold one block of {self.block_size}: "
                "raise --kv-tokens or lower --block-size"
            )
        return _blocks("--kv-tokens", tokens, self.block_size)


@dataclass(frozen=True)
class ModelOptions:
    """The model, and the device that it runs on."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="smollm2-135m (embedded), tiny-random, a local directory, or a Hugging Face id.",
        ),
    ] = "smollm2-135m"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto"
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    load_format: Annotated[
        Format, typer.Option(help="`dummy` builds the architecture with random weights.")
    ] = Format.AUTO
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of torch.  Default: torch's own.")
    ] = None
