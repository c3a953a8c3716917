"""Options that several commands share, and what they mean."""

from __future__ import annotations

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


_TTFT = typer.Option(
    "--slo-ttft", parser=duration, metavar="TIME", help="TTFT promise: 500ms, 1s, 0.5."
)
_TPOT = typer.Option(
    "--slo-tpot", parser=duration, metavar="TIME", help="TPOT promise: 50ms, 0.05."
)
TTFT = Annotated[float, _TTFT]
TPOT = Annotated[float, _TPOT]
SomeTTFT = Annotated[float | None, _TTFT]
SomeTPOT = Annotated[float | None, _TPOT]
TraceSource = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="FILE|KIND",
        help=f"A trace file (Azure CSV, Mooncake JSONL, ours) or one of {', '.join(KINDS)}.",
    ),
]
Rate = Annotated[
    float | None, typer.Option(help="Requests/s, by time compression.  Default: the trace's own.")
]
NumRequests = Annotated[
    int | None, typer.Option("--num-requests", "-n", min=1, help="Only so many (synthetic: 200).")
]
LengthScale = Annotated[
    float, typer.Option(help="Multiply all lengths, as 0.125 for a laptop on a datacentre's trace.")
]
MaxPrompt = Annotated[int | None, typer.Option(min=1, help="Clip longer prompts to this.")]
MaxOutput = Annotated[int | None, typer.Option(min=1, help="Clip longer outputs to this.")]
Seed = Annotated[int, typer.Option(min=0, help="Of everything that is random.")]
PolicyName = Annotated[
    str,
    typer.Option(metavar="NAME[:option=value,…]", help="See `slosched policies`."),
]
Rule = Annotated[
    DeadlineRule, typer.Option(help="What makes a token on time, for policy and metric alike.")
]
Preemption = Annotated[
    PreemptionMode, typer.Option(help="What happens to the KV cache of a preempted request.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens in one step.")]
MaxSeqs = Annotated[int, typer.Option(min=1, help="Requests running at once.")]
Noise = Annotated[
    float, typer.Option(min=0, help="Sigma of a lognormal factor on every simulated step's time.")
]
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens in one KV block.")]
KVTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens that the KV cache holds.  Default: what memory allows."),
]
HostKVTokens = Annotated[
    int, typer.Option(min=0, help="Tokens of KV cache in host memory, for preemption by swap.")
]
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="smollm2-135m (embedded), tiny-random, a local directory, or a Hugging Face id.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
LoadFormat = Annotated[
    Format, typer.Option(help="`dummy` builds the architecture with random weights.")
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads of torch.  Default: torch's own.")
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


def open_trace(
    source: str,
    *,
    num_requests: int | None,
    rate: float | None,
    seed: int,
    slo: SLO | None,
    length_scale: float = 1.0,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> Trace:
    """The trace that the options describe.  An SLO given replaces those in the file."""
    if source in KINDS and not Path(source).exists():
        trace = synthesize(source, num_requests=num_requests or SYNTHETIC_REQUESTS, seed=seed)
    else:
        trace = _read(source)
        trace = trace if num_requests is None else trace.head(num_requests)
    if rate is not None:
        trace = trace.scaled_to(rate)
    if length_scale != 1.0:
        trace = trace.with_lengths_scaled(length_scale)
    if slo is not None:
        trace = trace.with_slo(slo)
    return trace.clipped(max_prompt_tokens, max_output_tokens).trace


def _read(source: str) -> Trace:
    try:
        return read_trace(source)
    except OSError as error:
        raise TraceError(
            f"no trace {source!r}: neither a file that can be read ({error.strerror}) nor one of "
            f"the kinds to synthesize ({', '.join(KINDS)})"
        ) from error


def num_blocks(num_tokens: int, block_size: int) -> int:
    """KV blocks of a cache of so many tokens."""
    if num_tokens < block_size:
        raise ValueError(
            f"a KV cache of {num_tokens} tokens does not hold one block of {block_size}: "
            "raise --kv-tokens or lower --block-size"
        )
    return num_tokens // block_size


def slo_from(ttft_s: float | None, tpot_s: float | None) -> SLO | None:
    """None if neither was given."""
    if ttft_s is None and tpot_s is None:
        return None
    return SLO(ttft_s or NO_SLO.ttft_s, tpot_s or NO_SLO.tpot_s)


def make_limits(
    max_num_batched_tokens: int, max_num_seqs: int, preemption: PreemptionMode, rule: DeadlineRule
) -> Limits:
    return Limits(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        preemption_mode=preemption,
        deadline_rule=rule,
    )
