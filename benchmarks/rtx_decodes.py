"""The RTX PRO 6000's decode steps: its latency model against the kernels that were measured.

    git clone https://github.com/casys-kaist/LLMServingSim
    python -m benchmarks.rtx_decodes LLMServingSim/profiler/perf

Prints the model's error on steps of decodes alone.  Then it prints how far the simulation of the
measured vLLM run (docs/fidelity.md) is off, with the model, with the measured times of equal
contexts in its place for such steps, and with what unequal contexts add, as measured where one or
two of the contexts are four times as long as the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from scipy.interpolate import RegularGridInterpolator

from experiments.fidelity.sharegpt import RUNS, simulate_run
from slosched.core import BatchShape
from slosched.perfmodel import load_model
from slosched.perfmodel.layered import LayeredModel

TABLES = "RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1"
REPEATS = 3
"""The times in skew.csv are sums over so many repetitions."""
NUM_LAYERS = 32
DECODES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
CONTEXTS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
LATENCIES = ("ttft_mean_s", "tpot_mean_s", "e2e_mean_s")


class MeasuredDecodes:
    """Predicts as a model does, but takes the attention of decodes alone from measurements."""

    def __init__(
        self, model: LayeredModel, attention_s: pd.DataFrame, unequal_s: pd.Series | None = None
    ) -> None:
        self.fitted_s = model.predict
        self._fitted_attention_s = model.attention.asked()
        grid = (attention_s.index.to_numpy(), attention_s.columns.to_numpy())
        self._measured_s = RegularGridInterpolator(grid, attention_s.to_numpy())
        self._unequal_s = unequal_s

    def predict(self, shape: BatchShape) -> float:
        """Return the seconds of a step; of unequal contexts the mean counts, and the longest."""
        if shape.num_prefills or not shape.num_decodes:
            return self.fitted_s(shape)
        context = min(CONTEXTS[-1], shape.decode_context_tokens / shape.num_decodes)
        measured_s = float(self._measured_s((shape.num_decodes, context)))
        if (per_token_s := self._unequal_s) is not None:
            longer_s = np.interp(shape.num_decodes, per_token_s.index, per_token_s)
            measured_s += float(longer_s) * (shape.max_decode_context_tokens - context)
        return self.fitted_s(shape) - self._fitted_attention_s(shape) + measured_s

    def error(self, num_decodes: int, context_tokens: int) -> float:
        """Return how far the model is off for decodes of equal context, in percent."""
        shape = BatchShape()
        for _ in range(num_decodes):
            shape.add(1, context_tokens)
        return 100 * (self.fitted_s(shape) / self.predict(shape) - 1)


def attention_seconds(perf: Path) -> pd.DataFrame:
    """Return the measured seconds of all layers' attention, by decodes and their context."""
    rows = pd.read_csv(perf / TABLES / "attention.csv")
    alone = rows[rows["prefill_chunk"] == 0]
    micros = alone.pivot(index="n_decode", columns="kv_decode", values="time_us")
    return NUM_LAYERS * micros.loc[DECODES, CONTEXTS] / 1e6


def unequal_seconds(perf: Path) -> pd.Series:
    """Return what each token of the longest context beyond the mean adds, by decodes."""
    rows = pd.read_csv(perf / TABLES / "skew.csv")
    rows = rows[(rows["regime"] == "pure") & (rows["nb"] <= 2) & rows["kvs"].between(512, 2048)]
    added_us = (rows["t_skew_us"] - rows["t_mean_us"]) / REPEATS
    per_token_us = added_us / (rows["kv_big"] - rows["kv_mean"])
    return NUM_LAYERS * per_token_us.groupby(rows["n"]).mean().clip(lower=0) / 1e6


def main(
    perf: Annotated[Path, typer.Argument(help="LLMServingSim's folder profiler/perf")],
) -> None:
    console = Console()
    run = RUNS[1]
    model = load_model(run.model)
    assert isinstance(model, LayeredModel)
    measured = MeasuredDecodes(model, attention_seconds(perf))
    unequal = MeasuredDecodes(model, attention_seconds(perf), unequal_seconds(perf))
    errors = pd.DataFrame({c: [measured.error(n, c - 1) for n in DECODES] for c in CONTEXTS})
    console.print(f"errors of {run.model} in percent, by decodes and their context in tokens")
    console.print(errors.set_axis(DECODES).round(1).to_string())
    for decodes, predict in (
        ("fitted", model.predict),
        ("measured", measured.predict),
        ("measured unequal", unequal.predict),
    ):
        model.predict = predict  # type: ignore[method-assign]
        seen = simulate_run(run, model)
        off = {name: float(seen[f"{name}_sim"]) / float(seen[name]) - 1 for name in LATENCIES}
        said = ", ".join(f"{name} {100 * error:+.1f} %" for name, error in off.items())
        console.print(f"{run.served} with {decodes} decodes: {said}")


if __name__ == "__main__":
    typer.run(main)
