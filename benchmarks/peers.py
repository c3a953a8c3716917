"""The speed of the simulator against its peers: same requests, same device, in turns.

    python benchmarks/peers.py --vidur-python /tmp/vidur/bin/python -n 1000
    python benchmarks/peers.py --vidur-python … --dynamo-python /tmp/dynamo/bin/python -n 19366

The requests are those of Azure's conversation trace of 2023 at its natural rate; where the file is
absent, a generator fitted to it draws them. They run on one replica by Sarathi's rule, in steps of
at most 512 tokens, with 512 seats and KV blocks of 16 tokens.  Every simulator takes its step times
from the same latency model, slosched's.  CPU seconds are those of the replay alone. Every count is
made in a fresh process, the simulators take turns, and a ratio compares two counts of the same
turn. benchmarks/README.md says how to get the peers.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table as RichTable

from slosched.core import BatchShape, LatencyModel
from slosched.perfmodel import load_model
from slosched.workload import Trace, read_trace, synthesize

HERE = Path(__file__).parent
AZURE_CONV = HERE.parents[1] / "shared" / "traces" / "azure_conv_2023.csv"
MODEL = "a100/llama-3.1-8b"
CHUNK_TOKENS = MAX_NUM_SEQS = 512
BLOCK_SIZE = 16
COLUMNS = (
    "simulator",
    "mean E2E s",
    "steps",
    "CPU s",
    "requests/CPU s",
    "µs/step",
    "slosched takes of it",
)
FloatArray = npt.NDArray[np.float64]


@dataclass
class Simulator:
    """A simulator, which is one row of the table: how it is started, and its turns' counts."""

    name: str
    python: str
    driver: str
    setup: dict[str, Any]
    turns: list[dict[str, Any]] = field(default_factory=list)

    def take_turn(self, folder: Path) -> None:
        path = folder / "setup.json"
        path.write_text(json.dumps(self.setup))
        command = [self.python, str(HERE / self.driver), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{self.name} failed: {' '.join(command)}\n{done.stderr[-2000:]}")
        self.turns.append(json.loads(done.stdout.splitlines()[-1]))

    @property
    def cpu_s(self) -> list[float]:
        return [turn["cpu_s"] for turn in self.turns]

    def row(self, num_requests: int, ours: Simulator) -> tuple[str, ...]:
        last, cpu_s = self.turns[-1], median(self.cpu_s)
        if last["completed"] != num_requests:
            sys.exit(f"{self.name} ended {last['completed']} of {num_requests} requests")
        ratios = [a / b for a, b in zip(ours.cpu_s, self.cpu_s, strict=True)]
        return (
            f"{self.name} {last['version']}",
            f"{last['mean_e2e_s']:.2f}",
            f"{last['steps']:,}" if last["steps"] else "not told",
            spread(self.cpu_s, ".2f"),
            f"{num_requests / cpu_s:,.0f}",
            f"{1e6 * cpu_s / last['steps']:.1f}" if last["steps"] else "",
            "" if self is ours else spread(ratios, ".3f"),
        )


def spread(values: list[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def step_times(model: LatencyModel, max_context_tokens: int) -> dict[str, FloatArray]:
    """Return milliseconds of steps, split into the parts from which the peers compose a step.

    A step is its layers, by tokens, plus attention: of n decodes, or of one chunk on a context.
    The last five arrays are what Dynamo reads: there a step is a chunk, by tokens, plus decodes.
    """
    contexts = np.linspace(0, 512 * -(-max_context_tokens // 512), 33).astype(int)
    sizes = range(1, max(CHUNK_TOKENS, MAX_NUM_SEQS) + 1)

    def decodes_ms(number: int, context: int) -> float:
        shape = BatchShape()
        shape.add_decodes([context + 1] * number)
        return 1e3 * model.predict(shape)

    def chunk_ms(tokens: int, context: int) -> float:
        return 1e3 * model.predict_prefill(tokens, context)

    layers = np.array([decodes_ms(size, 0) for size in sizes])
    decodes = np.array([[decodes_ms(size, kv) for kv in contexts] for size in sizes])
    chunks = np.array([[chunk_ms(size, kv) for kv in contexts] for size in sizes])
    mean_contexts = np.maximum(contexts, 1)
    held = np.linspace(0, MAX_NUM_SEQS * 1024, 257).astype(int)
    numbers = np.clip(np.rint(held[:, None] / mean_contexts[None, :]), 1, MAX_NUM_SEQS).astype(int)
    itl = [
        [decodes[n - 1, at] for n, at in zip(row, range(len(contexts)), strict=True)]
        for row in numbers
    ]
    return {
        "kv_tokens": contexts.astype(float),
        "layers_ms": layers,
        "attn_decode_ms": np.maximum(decodes - layers[:, None], 0),
        "attn_prefill_ms": np.maximum(chunks - layers[:, None], 0),
        "prefill_isl": np.array(sizes, dtype=float),
        "prefill_ttft_ms": np.maximum(chunks[:, 0] - layers[0], 0),
        "decode_active_kv_tokens": held.astype(float),
        "decode_context_length": mean_contexts.astype(float),
        "decode_itl": np.array(itl),
    }


def open_trace(num_requests: int) -> Trace:
    if AZURE_CONV.exists():
        return read_trace(AZURE_CONV).head(num_requests)
    return synthesize("azure_conv", num_requests=num_requests)


def write_setup(trace: Trace, folder: Path) -> dict[str, Any]:
    """Write the requests and the step times to files, and return the setup that names them."""
    requests, times = folder / "requests.csv", folder / "step_times.npz"
    with requests.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arrived_at", "num_prefill_tokens", "num_decode_tokens"))
        for r in trace.requests:
            writer.writerow((r.arrival_s, r.num_prompt_tokens, r.num_output_tokens))
    model = load_model(MODEL)
    longest = max(r.num_prompt_tokens + r.num_output_tokens for r in trace.requests)
    np.savez(times, **step_times(model, longest))  # type: ignore[arg-type]
    return {
        "requests": str(requests),
        "step_times": str(times),
        "model": MODEL,
        "chunk_tokens": CHUNK_TOKENS,
        "max_num_seqs": MAX_NUM_SEQS,
        "block_size": BLOCK_SIZE,
        "num_blocks": int(model.provenance["kv_capacity_tokens"]) // BLOCK_SIZE,
        "write_metrics": False,
    }


def main(
    vidur_python: Annotated[str, typer.Option(help="A Python that can import vidur.")] = "",
    dynamo_python: Annotated[
        list[str] | None, typer.Option(help="One with ai-dynamo-runtime; once for each version.")
    ] = None,
    vidur_metrics: Annotated[
        bool, typer.Option("--vidur-metrics", help="Vidur as shipped, with its metrics, too.")
    ] = False,
    num_requests: Annotated[int, typer.Option("--num-requests", "-n", min=2)] = 1000,
    turns: Annotated[int, typer.Option(min=1, help="How often each is counted.")] = 3,
) -> None:
    """Print one row for each simulator: medians, with minimum and maximum in brackets."""
    console = Console(width=130)
    trace = open_trace(num_requests)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setup = write_setup(trace, folder)
        ours = Simulator("slosched", sys.executable, "peer_slosched.py", setup)
        simulators = [ours]
        if vidur_python:
            simulators.append(Simulator("Vidur", vidur_python, "peer_vidur.py", setup))
        if vidur_python and vidur_metrics:
            with_metrics = setup | {"write_metrics": True}
            simulators.append(
                Simulator("Vidur, metrics on,", vidur_python, "peer_vidur.py", with_metrics)
            )
        for python in dynamo_python or []:
            simulators.append(Simulator("Dynamo", python, "peer_dynamo.py", setup))
        todo = simulators * turns
        for simulator in track(todo, "Taking turns", console=Console(stderr=True)):
            simulator.take_turn(folder)
    title = f"{trace.name}: {len(trace):,} requests, {trace.rate:.2f}/s, {MODEL}"
    table = RichTable(*COLUMNS, title=title, title_justify="left")
    for simulator in simulators:
        table.add_row(*simulator.row(len(trace), ours))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
