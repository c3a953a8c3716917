"""The errors of the latency model: every form on every set of measurements, held out.

    python -m benchmarks.latency_model                      # all sets that are present
    python -m benchmarks.latency_model lss                  # measured kernels of three GPUs
    python -m benchmarks.latency_model experts              # mixtures of experts (extra)
    python -m benchmarks.latency_model experts PERF         # one that was measured
    python -m benchmarks.latency_model aic                  # AIConfigurator's tables (extra)
    python -m benchmarks.latency_model vllm --plot runs/vllm.png
    python -m benchmarks.latency_model pair profile.csv traffic.csv

Errors are percentages of the measured time; "under p99" is the 99th percentile of under-prediction.
At most 160 measured steps are fitted. Forms with a table of the layers' times get that table as the
profiler of operators measured it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import timeit
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.experts import composed_mixtures, measured_mixtures
from benchmarks.trees import REFERENCES, TreesModel, fit_trees
from slosched.core import BatchShape, LatencyModel, Limits
from slosched.perfmodel import (
    FITTERS,
    ErrorReport,
    FitError,
    Measurement,
    OnlineModel,
    Part,
    Profile,
    load_model,
    read_profile,
    scaled,
)
from slosched.perfmodel.errors import predictions, report_errors
from slosched.perfmodel.split import covering, on_grid
from slosched.policy import FCFS
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload.trace import Trace, TraceRequest

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data" / "llmservingsim"
MAX_FITTED = 160
COLUMNS = ("form", "fitted", "judged", "MAPE", "p50", "p90", "p99", "max", "under p99", "µs/query")

app = typer.Typer(add_completion=False, help=__doc__, invoke_without_command=True)
console = Console(width=120)


@dataclass(frozen=True)
class Task:
    """The measurements of one comparison: those that are fitted, and those that judge."""

    title: str
    train: Sequence[Measurement]
    test: Sequence[Measurement]
    provenance: Mapping[str, str]


def judge(task: Task) -> None:
    """Print a table with the errors of every form and of the trees."""
    table = RichTable(*COLUMNS, title=task.title, title_justify="left")
    steps = sum(m.part is Part.STEP for m in task.train)
    left_out: list[str] = []
    for name, fitter in FITTERS.items():
        try:
            model, _ = fitter(task.train, task.provenance, 0)
        except FitError as error:
            left_out.append(f"{name} was not fitted: {error}")
            continue
        report = report_errors(predictions(model, task.test), task.test)
        table.add_row(*_row(name, steps, report, query_us(model)))
    for name in REFERENCES:
        trees = fit_trees(name, task.train)
        report = report_errors(trees.predict_many(task.test), task.test)
        cost_us = query_us(trees, number=1)
        table.add_row(*_row(f"{name} (reference)", steps, report, cost_us))
    console.print(table, *left_out)


def _row(name: str, fitted: int, error: ErrorReport, cost_us: float) -> tuple[str, ...]:
    percents = (error.mape, error.p50, error.p90, error.p99, error.max, error.under_p99)
    return (
        name,
        str(fitted),
        str(error.count),
        *(f"{p:.2f}" for p in percents),
        f"{cost_us:.2f}" if cost_us < 100 else f"{cost_us:.0f}",
    )


def _mixed() -> BatchShape:
    shape = BatchShape()
    shape.add(512, 1024)
    shape.add_decodes([700] * 63)
    return shape


MIXED = _mixed()


def query_us(model: LatencyModel | TreesModel, number: int = 30) -> float:
    """Measure the time to add one chunk and predict once, which is what a policy asks."""
    shape = BatchShape()
    sums = MIXED.sums

    def ask() -> None:
        shape.add(64, 2048)
        model.predict(shape)

    # The batch is restored before each repeat, so that it keeps a realistic size.
    times = timeit.repeat(ask, setup=lambda: shape.restore(sums), number=number, repeat=100)
    return 1e6 * min(times) / number


@app.callback()
def everything(
    context: typer.Context,
    plot: Annotated[Path | None, typer.Option(help="figure of the real runs")] = None,
) -> None:
    """Run all benchmarks whose data are present, unless a command names one."""
    if context.invoked_subcommand is None:
        lss(SHARED)
        aic()
        vllm(SHARED, plot)


@app.command()
def lss(perf: Annotated[Path, typer.Option(help="LLMServingSim's profiler/perf")] = SHARED) -> None:
    """Judge on steps composed from measured kernels: random, off the grid, unequal contexts."""
    if not perf.exists():
        console.print(f"skipped: LLMServingSim's tables are not at {perf}")
        return
    compose = _script("profiling/llmservingsim/compose.py")
    for source in compose.SOURCES:
        profile = compose.compose(source, perf)
        for task in lss_tasks(source.name, profile, compose.compose_skewed(source, perf)):
            judge(task)


def lss_tasks(name: str, profile: Profile, skewed: Sequence[Measurement]) -> Iterator[Task]:
    layers = [m for m in profile.measurements if m.part is Part.LAYERS]
    steps = [m for m in profile.measurements if m.part is Part.STEP]
    order = np.random.default_rng(0).permutation(len(steps)).tolist()
    half = [steps[i] for i in order[: len(steps) // 2]]
    rest = [steps[i] for i in order[len(steps) // 2 :]]
    grid, off = [m for m in steps if on_grid(m)], [m for m in steps if not on_grid(m)]

    def train(pool: Sequence[Measurement]) -> list[Measurement]:
        return [*layers, *(pool[i] for i in covering(pool, MAX_FITTED))]

    yield Task(f"{name}: random split", train(half), rest, profile.provenance)
    if off:
        yield Task(f"{name}: off the power-of-two grid", train(grid), off, profile.provenance)
        large = [m for m in off if _context_tokens(m) > 200_000]
        if large:
            title = f"{name}: off the grid, more than 200,000 tokens of context"
            yield Task(title, train(grid), large, profile.provenance)
    if skewed:
        yield Task(f"{name}: decodes of unequal context", train(half), skewed, profile.provenance)


def _context_tokens(measurement: Measurement) -> int:
    return sum(new + prior for new, prior in measurement.chunks)


@app.command()
def experts(
    perf: Annotated[
        Path | None, typer.Argument(help="profiler/perf of a clone of LLMServingSim")
    ] = None,
) -> None:
    """Judge on mixtures of experts, fitted to whole steps without a table of the layers.

    With a folder, the steps are composed from measured kernels, without from AIConfigurator's
    tables.
    """
    if perf is None:
        for title, fitted, judged in composed_mixtures():
            judge(Task(title, fitted.measurements, judged.measurements, fitted.provenance))
        return
    for title, profile in measured_mixtures(perf, _script("profiling/llmservingsim/compose.py")):
        for task in lss_tasks(title, profile, ()):
            judge(task)


@app.command()
def aic() -> None:
    """Judge on batches composed from AIConfigurator's tables: additive by construction."""
    try:
        tasks = list(_aic_tasks())
    except ImportError as error:
        console.print(f"skipped: {error}; pip install 'slosched[aiconfigurator]'")
        return
    for task in tasks:
        judge(task)


def _aic_tasks() -> Iterator[Task]:
    compose = _script("profiling/aiconfigurator/compose.py")
    for source in compose.SOURCES:
        train = read_profile(ROOT / "profiling" / "aiconfigurator" / f"{source.name}.csv")
        yield Task(
            f"{source.name}: AIConfigurator, additive by construction",
            train.measurements,
            compose.judged_steps(source).measurements,
            train.provenance,
        )


@app.command()
def pair(
    profile: Annotated[Path, typer.Argument(help="CSV that is fitted")],
    traffic: Annotated[Path, typer.Argument(help="CSV of recorded steps that judge")],
) -> None:
    """Judge a profile on the steps of real traffic, and the online model's 99 % quantile."""
    fitted, judged = read_profile(profile).merged(), read_profile(traffic).measurements
    judge(Task(f"{profile} on {traffic}", fitted.measurements, judged, fitted.provenance))
    for name, fitter in FITTERS.items():
        try:
            model, _ = fitter(fitted.measurements, fitted.provenance, 0)
        except FitError:
            continue
        console.print(f"{name}: {_online(OnlineModel(model), judged)}")


def _online(model: OnlineModel, steps: Sequence[Measurement]) -> str:
    """Describe the errors of a model that is asked about each step, then learns from it."""
    predicted, upper = [], []
    for step in steps:
        predicted.append(model.predict(step.shape))
        upper.append(model.predict_upper(step.shape))
        model.observe(step.shape, step.seconds)
    report = report_errors(np.array(predicted), steps)
    measured = np.array([m.seconds for m in steps])
    covered = float((measured <= np.array(upper)).mean())
    margin = float(np.median(np.array(upper) / np.array(predicted)))
    return (
        f"online MAPE {report.mape:.2f} %, p99 {report.p99:.2f} %; the upper quantile covers "
        f"{covered:.2%} of {len(steps)} steps at a median margin of {margin - 1:.1%}"
    )


@dataclass(frozen=True)
class Run:
    """A real vLLM run and the bundled model of its GPU."""

    model: str
    served: str
    max_num_seqs: int
    kv_capacity_tokens: int


RUNS = (
    Run("rtx4090/llama-3.1-8b", "RTX4090/Llama-3.1-8B", 256, 41_408),
    Run("rtxpro6000/llama-3.1-8b", "RTXPRO6000/Llama-3.1-8B", 128, 520_000),
)


@app.command()
def vllm(
    perf: Annotated[Path, typer.Option(help="LLMServingSim's profiler/perf")] = SHARED,
    plot: Annotated[Path | None, typer.Option(help="distributions side by side")] = None,
) -> None:
    """Compare the simulator with 300 requests that vLLM 0.19 served on two GPUs."""
    if not (perf / "vllm_runs").exists():
        console.print(f"skipped: no real runs at {perf / 'vllm_runs'}")
        return
    table = RichTable("run", "TTFT mean", "TPOT mean", "TTFT p50 / p99", "TPOT p50 / p99")
    drawn: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for run in RUNS:
        trace, real = read_run(perf, run)
        model = load_model(run.model)
        as_fitted = replay(trace, run, model)
        factor = float(np.nanmean(real[1]) / np.nanmean(as_fitted[1]))
        corrected = replay(trace, run, scaled(model, factor))
        versions = {
            "vLLM 0.19": real,
            "simulated": as_fitted,
            f"simulated, x {factor:.3f}": corrected,
        }
        drawn[run.model] = versions
        for name, times in versions.items():
            table.add_row(f"{run.model} {name}", *_against(times, real))
    console.print(table)
    console.print(
        "the factor makes the mean TPOT right (what eager kernels' times leave out, or have too "
        "much); the TTFT under it was not fitted"
    )
    if plot is not None:
        _draw(drawn, plot)


def read_run(perf: Path, run: Run) -> tuple[Trace, tuple[np.ndarray, np.ndarray]]:
    """Read the requests as they came, and their TTFT and TPOT in seconds (NaN for one token)."""
    lines = (perf / "vllm_runs" / run.served / "requests.jsonl").read_text().splitlines()
    rows = sorted(map(json.loads, lines), key=lambda r: float(r["queued_ts"]))
    trace = Trace.of(
        [
            TraceRequest(r["request_id"], r["queued_ts"], r["input_toks"], r["output_toks"])
            for r in rows
        ],
        "ShareGPT, as served",
    )
    ttft = np.array([r["first_token_ts"] - r["queued_ts"] for r in rows])
    tpot = np.array(
        [
            (r["last_token_ts"] - r["first_token_ts"]) / (r["output_toks"] - 1)
            if r["output_toks"] > 1
            else np.nan
            for r in rows
        ]
    )
    return trace, (ttft, tpot)


def replay(trace: Trace, run: Run, model: LatencyModel) -> tuple[np.ndarray, np.ndarray]:
    limits = Limits(max_num_batched_tokens=2048, max_num_seqs=run.max_num_seqs)
    config = SimulationConfig(limits, num_blocks=run.kv_capacity_tokens // 16)
    requests = sorted(simulate(trace, FCFS(), model, config), key=lambda r: r.arrival_s)
    ttft = [r.token_times_s[0] - r.arrival_s for r in requests]
    tpot = [
        (r.token_times_s[-1] - r.token_times_s[0]) / (len(r.token_times_s) - 1)
        if len(r.token_times_s) > 1
        else np.nan
        for r in requests
    ]
    return np.array(ttft), np.array(tpot)


def _against(
    times: tuple[np.ndarray, np.ndarray], real: tuple[np.ndarray, np.ndarray]
) -> list[str]:
    means, spreads = [], []
    for values, truth, unit, factor in zip(times, real, ("s", "ms"), (1, 1e3), strict=True):
        mean, expected = np.nanmean(values), np.nanmean(truth)
        means.append(f"{factor * mean:.2f} {unit} ({mean / expected - 1:+.1%})")
        p50, p99 = factor * np.nanpercentile(values, (50, 99))
        spreads.append(f"{p50:.2f} / {p99:.2f} {unit}")
    return [*means, *spreads]


def _draw(runs: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]], path: Path) -> None:
    from matplotlib.figure import Figure  # only if a figure is asked for

    figure = Figure(figsize=(9, 3.2 * len(runs)), layout="constrained")
    grid = figure.subplots(len(runs), 2, squeeze=False)
    for axes_row, (name, versions) in zip(grid, runs.items(), strict=True):
        for axes, which, label in zip(axes_row, (0, 1), ("TTFT (s)", "TPOT (s)"), strict=True):
            for style, (version, times) in zip(("-", "--", ":"), versions.items(), strict=True):
                values = np.sort(times[which][~np.isnan(times[which])])
                share = np.arange(1, len(values) + 1) / len(values)
                axes.plot(values, share, style, linewidth=2, label=version)
            axes.set(xlabel=label, ylabel="share of requests", title=name)
            axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    console.print(f"wrote {path}")


def _script(path: str) -> ModuleType:
    """Import a script of the repository that is in no package."""
    name = path.replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    app()
