"""Options that several commands share, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from slosched.core import NO_SLO, SLO, DeadlineRule, Limits, PreemptionMode
from slosched.workload import KINDS, Trace, TraceError, parse_duration, read_trace, synthesize


def duration(text: str) -> float:
    """Seconds; a complaint that typer shows beside the option's name."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


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
        metavar="FILE|KIND",
        help="A trace file (Azure, BurstGPT, Mooncake, ShareGPT, …; see docs/how-to/traces.md) "
        f"or one of {', '.join(KINDS)}.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Of everything that is random.")]
PolicyName = Annotated[
    str, typer.Option(metavar="NAME[:option=value,…]", help="See `slosched policies`.")
]
LatencyModelName = Annotated[
    str | None,
    typer.Option(
        "--latency-model",
        metavar="FILE|NAME",
        help="A model that `slosched fit` saved, or a bundled one.",
    ),
]
OutDir = Annotated[Path, typer.Option("--out", "-o", file_okay=False, help="Folder for results.")]

SYNTHETIC_REQUESTS = 200


@dataclass(frozen=True)
class PromiseOptions:
    """What requests are promised."""

    slo_ttft: TTFT = None
    slo_tpot: TPOT = None

    def slo(self) -> SLO | None:
        """None if neither was given."""
        if self.slo_ttft is None and self.slo_tpot is None:
            return None
        return SLO(self.slo_ttft or NO_SLO.ttft_s, self.slo_tpot or NO_SLO.tpot_s)


@dataclass(frozen=True)
class TraceOptions:
    """What is done to a trace before it is used."""

    rate: Annotated[
        float | None,
        typer.Option(help="Requests/s, by time compression.  Default: the trace's own."),
    ] = None
    num_requests: Annotated[
        int | None,
        typer.Option("--num-requests", "-n", min=1, help="Only so many (synthetic: 200)."),
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

    def open(self, source: str, slo: SLO | None, seed: int) -> Trace:
        """The trace of a file or kind.  An SLO given replaces those in the file."""
        if source in KINDS and not Path(source).exists():
            size = self.num_requests or SYNTHETIC_REQUESTS
            trace = synthesize(source, num_requests=size, seed=seed)
        else:
            trace = _read(source)
            trace = trace if self.num_requests is None else trace.head(self.num_requests)
        if self.rate is not None:
            trace = trace.scaled_to(self.rate)
        if self.length_scale != 1.0:
            trace = trace.with_lengths_scaled(self.length_scale)
        if slo is not None:
            trace = trace.with_slo(slo)
        return trace.clipped(self.max_prompt_tokens, self.max_output_tokens).trace


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
        return self.host_kv_tokens // self.block_size

    def num_blocks(self, default_tokens: int) -> int:
        """KV blocks of the cache; of `default_tokens` if no size was given."""
        tokens = default_tokens if self.kv_tokens is None else self.kv_tokens
        if tokens < self.block_size:
            raise ValueError(
                f"a KV cache of {tokens} tokens does not hold one block of {self.block_size}: "
                "raise --kv-tokens or lower --block-size"
            )
        return tokens // self.block_size


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


def _read(source: str) -> Trace:
    try:
        return read_trace(source)
    except OSError as error:
        raise TraceError(
            f"no trace {source!r}: neither a file that can be read ({error.strerror}) nor one of "
            f"the kinds to synthesize ({', '.join(KINDS)})"
        ) from error
