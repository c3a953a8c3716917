"""The page docs/fidelity.md; all its numbers and verdicts are made from the results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.arena.figures import save
from experiments.fidelity import demo_runs, full, results, sharegpt
from experiments.fidelity.judge import judge, learn_per_request_s
from experiments.fidelity.models import BACKENDS
from experiments.fidelity.report_full import full_servers
from experiments.fidelity.report_sharegpt import sharegpt_runs
from experiments.fidelity.stages import Stage, read_runs
from experiments.inside_vllm.compare import prediction_errors
from experiments.inside_vllm.results import PREDICTIONS, Book
from experiments.markdown import table
from slosched.evaluate.plots.style import COLOURS, MARKERS, WIDTH_IN, legend_above, log_axis, tidy

PAGE = Path(__file__).parents[2] / "docs" / "fidelity.md"
_NAMES = {
    "e2e_mean_s": "mean E2E latency",
    "tpot_mean_s": "mean TPOT",
    "ttft_p50_s": "median TTFT",
    "ttft_mean_s": "mean TTFT",
}
_BELOW: Mapping[str, tuple[float, float] | None] = {
    "e2e_mean_s": (3.0, 10.0),
    "tpot_mean_s": None,
    "ttft_p50_s": (5.0, 10.0),
    "ttft_mean_s": None,
}
_FULL: Mapping[str, tuple[float, float] | None] = {
    "e2e_mean_s": (3.0, 15.0),
    "tpot_mean_s": None,
    "ttft_p50_s": (5.0, 15.0),
}
"""Median and worst |error| in percent that we aim at."""
_POINTS = 5.0
_FEW, _MANY = 40, 80
"""Running requests at which a server is called lightly or heavily loaded."""
_SHOWN_PERCENT = 25.0
"""The largest error of the figure's axis."""


def write(page: Path = PAGE, folder: Path = results.HERE) -> None:
    """Write the page, and its figure into a folder with the same name."""
    compared = results.compared(folder)
    simulated = compared[compared["is_chosen"]]
    per_request_s = learn_per_request_s(simulated)
    stages = judge(simulated, per_request_s)
    save(errors_figure(stages[~stages["is_saturated"]]), page.with_suffix("") / "errors.svg")
    requests = results.read(sharegpt.NAME, folder)
    page.write_text(text(judge(compared, per_request_s), per_request_s, requests, folder))


def text(
    every: pd.DataFrame, per_request_s: float, requests: pd.DataFrame, folder: Path = results.HERE
) -> str:
    """Return the page in Markdown; `every` has the stages with every backend's tables."""
    stages = every[every["is_chosen"]]
    parts = [
        _HEAD,
        _summary(stages),
        "![Errors of mean E2E latency and of TTFT, by stage](fidelity/errors.svg)",
        _H100,
        _stages_table(stages),
        full_servers(stages, results.read(full.FULL, folder)),
        _learnt(per_request_s),
        _ASSUMPTIONS,
        _backends(every),
        _misses(stages),
        sharegpt_runs(requests),
        _inside_vllm(),
        _demo(demo_runs.read()),
        _foot(folder),
    ]
    return "\n\n".join(parts) + "\n"


_HEAD = (
    "# The simulator against real engines\n\n"
    "<!-- Made by `python -m experiments.fidelity report`; edit report.py there instead. -->\n\n"
    "Does a simulation say what a real server does? Here every measurement of a real engine that "
    "we have is compared with slosched's simulator. Nothing is fitted to a run that judges. Errors "
    "are simulated over measured, less one. How it is done: "
    "[experiments/fidelity](../experiments/fidelity/README.md)."
)


def _summary(stages: pd.DataFrame) -> str:
    judged = stages[stages["is_judged"]]
    full = judged["is_saturated"]
    rows = [
        *_summary_rows("below saturation", judged[~full], _BELOW),
        *_summary_rows("the same, not seen", judged[~full & ~judged["is_seen"]], _BELOW),
        *_summary_rows("in saturation", judged[full], _FULL),
    ]
    heads = ("H100, vLLM 0.15.1", "", "stages", "median error", "bias", "worst", "goals", "met")
    return (
        f"{len(judged)} stages of load on {judged['model'].nunique()} models judge. A stage counts "
        "as in saturation if requests spend more than a tenth of their time before their first "
        f"token.\n\n{table(heads, rows, 2)}\n\n{_SEEN}"
    )


_SEEN = (
    "Runs that were *seen* led to a rule: those of Mixtral to the one by which vLLM's tables are "
    "[not taken for its experts](how-to/profile-and-fit.md#which-engines-kernels), those of "
    "Llama-3.1 and Qwen2.5 to the [time of sampling](#misses). The sizes in both come from "
    "elsewhere, but that these runs fit now proves little."
)


def _summary_rows(
    state: str, judged: pd.DataFrame, goals: Mapping[str, tuple[float, float] | None]
) -> Iterator[tuple[object, ...]]:
    """Yield a row for each latency that has a name and perhaps a goal."""
    for latency, goal in goals.items():
        errors = judged[f"{latency}_error"].dropna()
        if errors.empty:
            continue
        yield (
            state,
            _NAMES[latency],
            len(errors),
            f"{errors.abs().median():.1f} %",
            f"{errors.median():+.1f} %",
            f"{max(errors, key=abs):+.1f} %",
            "" if goal is None else f"{goal[0]:g} % and {goal[1]:g} %",
            "" if goal is None else _met(errors, *goal),
        )


def _met(errors: pd.Series, median: float, worst: float) -> str:
    verdicts = (errors.abs().median() <= median, errors.abs().max() <= worst)
    return " and ".join("yes" if verdict else "no" for verdict in verdicts)


_H100 = (
    "## vLLM 0.15.1 on H100\n\n"
    "The authors of inference-sim measured vLLM with the client inference-perf: stages of load of "
    "10 or 20 minutes each. They publish the settings, the load and the aggregates of what the "
    "client saw ([training](https://github.com/inference-sim/training), whole summaries; "
    "[sim-to-real-accuracy-validation](https://github.com/inference-sim/sim-to-real-accuracy-"
    "validation), means and two quantiles). `python -m experiments.fidelity run` simulates them. "
    "Each line has measured values and, in brackets, the error. Runs that say *learnt from* do not "
    "judge; *seen* is [explained above](#the-simulator-against-real-engines)."
)


def _stages_table(stages: pd.DataFrame) -> str:
    heads = ("model, GPUs", "load", "rate/s", "E2E mean", "TPOT mean", "TTFT p50", "TTFT mean", "")
    rows = [
        (
            f"{row['model'].rpartition('/')[2]}, {row['tensor_parallel']}",
            row["workload"],
            f"{row['rate_per_s']:g}",
            _cell(row, "e2e_mean_s", "s"),
            _cell(row, "tpot_mean_s", "ms"),
            _cell(row, "ttft_p50_s", "ms"),
            _cell(row, "ttft_mean_s", "ms"),
            _mark(row),
        )
        for row in stages.to_dict("records")
    ]
    return table(heads, rows, 2)


def _mark(row: dict[object, object]) -> str:
    """Return what the table says of a run that does not judge freely."""
    if not row["is_judged"]:
        return "learnt from"
    return "seen" if row["is_seen"] else ""


def _cell(row: dict[object, object], latency: str, unit: str) -> str:
    """Return a measured latency and the simulator's error: "2.06 s (+0.3 %)"."""
    seconds, error = float(str(row[latency])), float(str(row[f"{latency}_error"]))
    if seconds != seconds:
        return "–"
    in_seconds = unit == "s" or seconds >= 1
    value = f"{seconds:.2f} s" if in_seconds else f"{1000 * seconds:.1f} ms"
    return f"{value} ({error:+.1f} %)"


def _learnt(per_request_s: float) -> str:
    runs = " and ".join(f"`{run}`" for run in results.LEARNT_FROM)
    return (
        "### What is learnt, and from which runs\n\n"
        "One number: HTTP, tokenizing and the network add "
        f"{1000 * per_request_s:.1f} ms to a TTFT. It is the median of what the simulated median "
        f"TTFT lacks in {runs}. Everything else is published by others: operator times by NVIDIA, "
        "the times of sampling by vLLM's developers, the sizes of the models, vLLM's settings. "
        "(The bundled models of vLLM count no sampling. They have 6.0 ms, which is what the same "
        "two runs give then.)"
    )


def _backends(every: pd.DataFrame) -> str:
    """Return a table of errors by model and by whose kernels the tables hold."""
    rows = []
    below = every[~every["is_saturated"]]
    for (model, gpus), of_model in below.groupby(["model", "tensor_parallel"], sort=False):
        num_backends = of_model.groupby(["run", "stage"])["backend"].transform("size")
        here = of_model[num_backends == of_model["backend"].nunique()]
        errors = here.groupby("backend")["tpot_mean_s_error"]
        taken = here.loc[here["is_chosen"], "backend"].iloc[0]
        cells = [
            f"{errors.get_group(b).median():+.1f} %" if b in errors.groups else "–"
            for b in BACKENDS
        ]
        rows.append((f"{str(model).rpartition('/')[2]}, {gpus}", taken, *cells))
    return (
        "### Whose kernels\n\n"
        "AIConfigurator has tables of three engines' kernels, and none of vLLM 0.15. `slosched "
        "profile --from aiconfigurator` takes vLLM's, unless they cannot be right for the model "
        "([how](how-to/profile-and-fit.md#which-engines-kernels)). This is the median error of "
        "TPOT below saturation, over the stages that were simulated with each of the tables that "
        "are named:\n\n"
        f"{table(('model, GPUs', 'taken', *BACKENDS), rows, 2)}"
    )


_ASSUMPTIONS = (
    "### What a simulation needs to know\n\n"
    "- **The prompts.** The recorded settings ask for conversations of several turns, but this "
    "version of inference-perf does not know the settings' names and falls back to its defaults "
    "(`results/config.yaml` of the runs): 100 different prompts, sent in turn. Their lengths agree "
    "with that in every stage. So after the first 100 requests vLLM's prefix cache has all but the "
    "last few tokens of every prompt, and a prefill is 1 to 16 tokens long.\n"
    "- **The arrivals.** inference-perf's `constant` load draws exponential gaps and scales them "
    "so that the stage lasts as long as asked: Poisson arrivals, not evenly spaced ones.\n"
    "- **Asynchronous scheduling**, on by default in vLLM 0.15: a request that arrives during step "
    "n is planned for step n + 2. The measured median TTFT is about 2.5 steps and some "
    "milliseconds; without `overlap` the simulator says 1.5 steps.\n"
    "- **The output's length** is the limit of the request, since `ignore_eos` is set. TPOT is "
    "computed from E2E and TTFT; this version of inference-perf reports half of it, since it "
    "counts two events for each token.\n"
    "- **Stages** follow one another when all requests have ended. The first 4 minutes of a stage, "
    "and at least 1,000 requests, are simulated."
)


def _misses(stages: pd.DataFrame) -> str:
    judged = stages[stages["is_judged"]]
    below = judged[~judged["is_saturated"]]
    by_model = below.groupby(["model", "tensor_parallel"], sort=False)[
        ["e2e_mean_s_error", "tpot_mean_s_error", "ttft_mean_s_error"]
    ].median()
    rows = [
        (f"{str(model).rpartition('/')[2]}, {gpus}", *(f"{error:+.1f} %" for error in errors))
        for (model, gpus), errors in zip(by_model.index, by_model.to_numpy(), strict=True)
    ]
    missing = [stage for run in read_runs() for stage in run if stage.run not in set(stages["run"])]
    return (
        "### Misses\n\n"
        "Median errors by model, below saturation:\n\n"
        f"{table(('model, GPUs', 'E2E mean', 'TPOT mean', 'TTFT mean'), rows, 1)}\n\n"
        f"{_MISSES}\n{_missing_ttft(below)}\n\nNot simulated: {_listed(missing)}."
    )


def _missing_ttft(below: pd.DataFrame) -> str:
    """Say how what a simulated TTFT lacks grows with the load."""
    known = below.dropna(subset=["ttft_p50_s"])
    lacks_ms = 1000 * (known["ttft_p50_s"] - known["ttft_p50_s_sim"])
    running = known["rate_per_s"] * known["e2e_mean_s"]
    return (
        "- **TTFT at high load** is short: vLLM's API server sends the tokens of a step one "
        "request after the other, so a first token waits the longer the more requests run. The "
        f"simulator adds the same time to all. With fewer than {_FEW} requests running, the median "
        f"stage lacks {lacks_ms[running < _FEW].median():.1f} ms, with more than {_MANY} "
        f"{lacks_ms[running > _MANY].median():.1f} ms. The runs learnt from do not show it, so "
        "nothing was learnt for it."
    )


_MISSES = (
    "- **Sampling.** vLLM follows a model's generation_config.json by default. Llama-2, Llama-3.1 "
    "and Qwen2.5 ask for top-p there, for which vLLM 0.15 sorts all logits of a step. "
    "AIConfigurator's tables have no sampling, so its time is added as vLLM's developers "
    "[measured it](how-to/profile-and-fit.md#sampling): 0.2 to 1.2 ms a step. Without it "
    "Llama-3.1 was 3 to 7 % too fast and Qwen2.5 8 to 11 %. Qwen2.5 also asks for a "
    "repetition penalty, which is not counted.\n"
    "- **Llama-2-7B** is 1 to 6 % too slow, and 13 % at 20/s, where each step that is too long "
    "makes more requests run. Decodes alone are right in the tables, to 0.2 ms a step, but "
    "[steps with a chunk are too long](latency-model.md#steps-of-real-servers-and-of-full-ones).\n"
    "- **What else the tables lack**: rotary embedding, gaps between kernels, all-reduces that "
    "have to wait for the last GPU. All of these make the simulator too fast, and the more so the "
    "more layers and GPUs there are.\n"
    "- **TTFT of long prompts** is short: the two reasoning loads have prompts of 1,000 tokens and "
    "more, which take longer to tokenize than the 600 of the runs learnt from, and with "
    "Llama-2-7B they fill the KV cache to the last block.\n"
    "- **Full servers**: the tables are 13 to 18 % short where 128 requests run at 1,800 tokens of "
    "context. Most of that grows while the queue grows, at the same load of the GPU, so it is not "
    "in the kernels; nor is it the API server's time for each token, since servers that sent more "
    "tokens were not slowed down "
    "([what is known of it](latency-model.md#steps-of-real-servers-and-of-full-ones)). So "
    "that the simulated servers of CodeLlama, Mixtral and Llama-2-70B answer more requests, and "
    "queues are shorter by far more than steps are. Llama-2-7B's KV cache holds about 60 of these "
    "requests, so that its server preempts all the time, and there the simulator is close.\n"
    "- **Stalls** of real servers, of up to a second, are in the measured mean TTFT and in its "
    "p99. No model of steps predicts them, so the median is the better comparison."
)


def _listed(stages: list[Stage]) -> str:
    runs = sorted({f"{s.model.rpartition('/')[2]} {s.workload}" for s in stages})
    return (
        f"{len(stages)} stages ({', '.join(runs)}). Composed from the tables, whose matrix "
        "products reach 15 % of the GPU's peak for this model, 64 decodes would take 90 ms, "
        "several times as long as measured"
    )


def _inside_vllm() -> str:
    book = Book()
    errors = prediction_errors(book.shown(), book.read(PREDICTIONS))
    close = int((errors["points"].abs() <= _POINTS).sum())
    worst = max(errors["points"], key=abs)
    return (
        "## vLLM 0.32 with slosched inside\n\n"
        "Policies inside vLLM against the simulator with the same policies, by SLO attainment: "
        f"{close} of {len(errors)} are within {_POINTS:g} points, the worst is "
        f"{worst:+.1f} points off. The latency model is fitted to steps that were "
        "recorded in the same runs, so this judges the scheduling and not the latency model: "
        "[inside_vllm.md](inside_vllm.md)."
    )


def _demo(runs: pd.DataFrame) -> str:
    rows = [
        (
            row["run"],
            row["policy"],
            f"{row['live']:.1%}",
            f"{row['simulated_mean']:.1%}",
            f"{row['points']:+.1f}",
            f"{row['slowness_least']:.2f} to {row['slowness_most']:.2f}",
        )
        for _, row in runs.iterrows()
    ]
    heads = ("run", "policy", "live", "simulated", "points", "steps over the model")
    by_machine = runs.groupby("machine", sort=False)
    told = " ".join(_agreement(str(machine), of) for machine, of in by_machine)
    return (
        "## Our own engine\n\n"
        "`slosched demo` profiles SmolLM2-135M on the machine on which it runs, fits the latency "
        "model, replays 60 requests against `slosched serve` under three policies, and simulates "
        "the same. The simulated machine is as slow, in the same stretches of 2 s, as the real one "
        "was while it served; the last column has the least and the most of that. Simulated "
        "attainments are means of nine simulations whose steps scatter differently. "
        f"{told}\n\n{table(heads, rows, 2)}"
    )


def _agreement(machine: str, runs: pd.DataFrame) -> str:
    worst = max(runs["points"], key=abs)
    return (
        f"On {machine}, {int((runs['points'].abs() <= _POINTS).sum())} of {len(runs)} are within "
        f"{_POINTS:g} points, the worst is {worst:+.1f} points off."
    )


def errors_figure(stages: pd.DataFrame) -> Figure:
    """Draw the errors over the measured values: mean TPOT, and TTFT."""
    figure = Figure(figsize=(WIDTH_IN * 1.1, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, latency, name in (
        (left, "tpot_mean_s", "mean TPOT, ms"),
        (right, "ttft_mean_s", "mean TTFT, ms"),
    ):
        _errors_panel(axes, stages, latency)
        axes.set_xlabel(f"measured {name}")
    left.set_ylabel("simulated against measured, %")
    legend_above(figure, ncols=3)
    return figure


def _errors_panel(axes: Axes, stages: pd.DataFrame, latency: str) -> None:
    """Draw a mark for each stage, hollow where something was learnt from it.

    Marks beyond the axis are drawn at its end, with their error.
    """
    tidy(axes)
    axes.axhspan(-5, 5, color="0.93", linewidth=0)
    axes.axhline(0, color="0.6", linewidth=0.8)
    servers = stages.groupby(["model", "tensor_parallel"], sort=False)
    for i, ((model, gpus), here) in enumerate(servers):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i // 2 % len(MARKERS)]
        label = f"{str(model).rpartition('/')[2]}, {gpus} GPU{'s' if int(str(gpus)) > 1 else ''}"
        for judges, fill in ((True, colour), (False, "none")):
            part = here[here["is_judged"] == judges]
            axes.plot(
                1000 * part[latency],
                part[f"{latency}_error"].clip(-_SHOWN_PERCENT, _SHOWN_PERCENT),
                marker,
                color=colour,
                mfc=fill,
                label=label if judges else None,
            )
    for measured_s, error in zip(stages[latency], stages[f"{latency}_error"], strict=True):
        if abs(error) > _SHOWN_PERCENT:
            place = (1000 * measured_s, math.copysign(_SHOWN_PERCENT, error))
            said = axes.annotate(
                f"{error:+.0f} %",
                place,
                (-6, -4),
                textcoords="offset points",
                ha="right",
                fontsize=8,
            )
            said.set_in_layout(False)
    axes.set_ylim(-1.08 * _SHOWN_PERCENT, 1.08 * _SHOWN_PERCENT)
    log_axis(axes)


def _foot(folder: Path) -> str:
    made = results.who_made(results.SIMULATED, folder)
    return (
        f"Simulated on {str(made['made'])[:10]} by code {made['code_digest']}. The numbers are in "
        "[experiments/fidelity/results](../experiments/fidelity/results), what was measured in "
        "[experiments/fidelity/measured](../experiments/fidelity/measured)."
    )
