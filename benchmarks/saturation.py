"""Steps of full servers: real vLLM on H100s against the sums of AIConfigurator's tables.

    pip install 'slosched[aiconfigurator]'
    git clone https://github.com/inference-sim/training
    python -m benchmarks.saturation training

The runs were made with inference-perf on H100s, with vLLM's defaults and at most 128 requests at
once.  Their prompts repeat, so that nearly all of them are cached and nearly every step is one of
decodes alone.  Half of the gaps that the client saw are between tokens that came together; the
third quartile is the median of the others, that is, the time of a step.  How many requests ran is
the rate times the mean time from the first token to the last (Little's law).  The sums count the
sampling of Llama-2, whose generation_config.json asks for top-p.

The last column is about steps with a chunk: how many there are, one for each request, by how much
the tables of vLLM make them longer, and by how much the longest tenth of all steps is longer than
the median.

The second table shows full servers while their queue grows: quantiles of TTFT beside those of the
mean step of a request.  A request that came later waited longer, so that both grow with time.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from slosched.perfmodel.aiconfigurator import Deployment, OperatorTables
from slosched.perfmodel.aiconfigurator.compose import with_sampling
from slosched.perfmodel.aiconfigurator.package import compile_model, peaks_of

SYSTEM = "h100_sxm"
MAX_NUM_SEQS = 128
CHUNK_TOKENS = 8
"""What is left of a cached prompt: 1 to 16 tokens."""
NUM_SMS = 132
"""Processors of an H100."""
LEVELS = ("p5", "p10", "p25", "median", "p75", "p90", "p95")
_EVENTS_PER_TOKEN = 2
"""The client counts two events for each token, and divides by their number."""
BACKENDS = ("vllm", "sglang", "trtllm")
MODELS = {
    "llama-2-7b": ("Llama-2-7b-hf", 1),
    "codellama-34b": ("CodeLlama-34b-Instruct-hf", 2),
    "llama-2-70b": ("Llama-2-70b-hf", 4),
    "mixtral-8x7b": ("Mixtral-8x7B-v0.1", 2),
}
"""For each word in a run's name, the folder of the model's config and the GPUs that share it."""


@dataclass(frozen=True)
class Stage:
    """What the client saw of one stage of a run."""

    name: str
    model: str
    num_running: int
    """An average; `MAX_NUM_SEQS` where requests were left unserved."""
    is_full: bool
    shortest_context: int
    longest_context: int
    step_s: float
    late_step_s: float
    """The time that nine of ten steps stay below."""
    chunk_share: float
    """How many of the steps have a chunk: one for each request."""
    while_queue_grows: tuple[tuple[float, float], ...]
    """Quantiles of TTFT and of a request's mean step, both in seconds, at the levels `LEVELS`."""


def read_stages(runs: Path) -> Iterator[Stage]:
    pattern = "default_args/*/results/stage_*_lifecycle_metrics.json"
    paths = sorted(runs.glob(pattern))
    if not paths:
        raise typer.BadParameter(f"no {runs / pattern}; is it a clone of inference-sim/training?")
    for path in paths:
        run = path.parents[1].name
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        served, latency = report["successes"], report["successes"]["latency"]
        decoding_s = latency["request_latency"]["mean"] - latency["time_to_first_token"]["mean"]
        num_running = served["throughput"]["requests_per_sec"] * decoding_s
        is_full = latency["time_to_first_token"]["median"] > decoding_s
        prompt = served["prompt_len"]["mean"]
        yield Stage(
            f"{run.split('-', 2)[2]} {path.name.split('_')[1]}",
            next(model for model in MODELS if model in run),
            MAX_NUM_SEQS if is_full else max(1, round(num_running)),
            is_full,
            round(prompt),
            round(prompt + served["output_len"]["mean"]),
            latency["inter_token_latency"]["p75"],
            latency["inter_token_latency"]["p95"],
            served["throughput"]["requests_per_sec"] * latency["inter_token_latency"]["p75"],
            tuple(
                (first_s[level], _EVENTS_PER_TOKEN * latency["time_per_output_token"][level])
                for first_s in [latency["time_to_first_token"]]
                for level in LEVELS
            ),
        )


@cache
def tables(runs: Path, model: str, backend: str) -> OperatorTables:
    folder, num_gpus = MODELS[model]
    config = str(runs / "model_configs" / folder)
    samples_top_p = folder.startswith("Llama-2")
    deployment = Deployment(SYSTEM, config, backend, num_gpus, samples_top_p=samples_top_p)
    compiled = compile_model(deployment)
    return with_sampling(compiled.tables(), deployment, compiled, peaks_of(SYSTEM))


def unequal_contexts(stage: Stage, num_kv_heads: int) -> float:
    """Return by which factor attention takes longer at most, as the contexts are unequal.

    Each request and KV head is one block of threads, and each processor takes the next block when
    it is free.  The contexts lie evenly between the shortest and the longest.  That is the most,
    since processors which are left over let the others read from memory faster.
    """
    rng = np.random.default_rng(0)
    contexts = rng.uniform(stage.shortest_context, stage.longest_context, stage.num_running)
    equal = np.full_like(contexts, contexts.mean())
    return _makespan(np.repeat(contexts, num_kv_heads)) / _makespan(np.repeat(equal, num_kv_heads))


def with_a_chunk(stage: Stage, operators: OperatorTables) -> str:
    """Return the share of steps with a chunk, and what it adds, composed and measured."""
    context = (stage.shortest_context + stage.longest_context) // 2
    decodes = [(1, context - 1)] * stage.num_running
    chunk = (CHUNK_TOKENS, stage.shortest_context - CHUNK_TOKENS)
    longer_s = operators.step_s([*decodes[1:], chunk]) - operators.step_s(decodes)
    late_s = stage.late_step_s - stage.step_s
    return f"{stage.chunk_share:.0%}: {1e3 * longer_s:+.1f}, seen {1e3 * late_s:+.1f}"


def _makespan(blocks: np.ndarray) -> float:
    ends = [0.0] * NUM_SMS
    for block in blocks.tolist():
        heapq.heapreplace(ends, ends[0] + block)
    return max(ends)


def main(
    runs: Annotated[Path, typer.Argument(help="a clone of github.com/inference-sim/training")],
) -> None:
    """Print the measured and the composed time of a decode step, for every stage of every run."""
    heads = ("run and stage", "running", "context", "measured", *BACKENDS, "unequal contexts")
    table = Table(*heads, "with a chunk")
    for stage in read_stages(runs):
        context = (stage.shortest_context + stage.longest_context) // 2
        composed, attention_s = [], 0.0
        for backend in BACKENDS:
            operators = tables(runs, stage.model, backend)
            attention_s = operators.decode_attention_s(stage.num_running, context)
            seconds = operators.layers_s(((1, 0),) * stage.num_running) + attention_s
            composed.append(f"{1e3 * seconds:.1f} ({1e3 * (stage.step_s - seconds):+.1f})")
        config = json.loads(
            (runs / "model_configs" / MODELS[stage.model][0] / "config.json").read_text("utf-8")
        )
        kv_heads = config.get("num_key_value_heads", config["num_attention_heads"])
        longer = unequal_contexts(stage, kv_heads // MODELS[stage.model][1]) - 1
        table.add_row(
            stage.name,
            f"{stage.num_running}{' (full)' if stage.is_full else ''}",
            str(context),
            f"{1e3 * stage.step_s:.1f} ms",
            *composed,
            f"{1e3 * longer * attention_s:+.1f} at most",
            with_a_chunk(stage, tables(runs, stage.model, BACKENDS[0])),
        )
    console = Console(width=170)
    console.print(table)
    console.print("in ms; in brackets, measured less composed")
    console.print(_while_queues_grow(runs))


def _while_queues_grow(runs: Path) -> Table:
    table = Table("full server", *LEVELS, title="TTFT in s: mean step of a request in ms")
    for stage in (stage for stage in read_stages(runs) if stage.is_full):
        cells = (
            f"{first_s:.0f}: {1e3 * step_s:.1f}" for first_s, step_s in stage.while_queue_grows
        )
        table.add_row(stage.name, *cells)
    return table


if __name__ == "__main__":
    typer.run(main)
