"""Fits and bundles latency models of GPUs from AIConfigurator's operator tables.

    pip install 'slosched[aiconfigurator]'
    python profiling/aiconfigurator/compose.py

For each source it writes one CSV next to itself (the 160 steps that are fitted, and the layers at
every tile edge), and the fitted model into the package.  Each model is judged on 1,500 other steps,
which are composed at each run; `--judged FOLDER` keeps them.  Models of GPUs without tables get the
error of the derivation instead.  `--only a30/` makes those whose names start so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import slosched.perfmodel
from slosched.perfmodel import FittedModel, Part, Profile, fit, save_model, write_profile
from slosched.perfmodel.aiconfigurator import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    UNMEASURED,
    Deployment,
    compose_profile,
    derive_profile,
)
from slosched.perfmodel.derivation import with_derivation_error
from slosched.perfmodel.errors import ErrorReport, predictions, report_errors
from slosched.perfmodel.forms import described
from slosched.perfmodel.server_time import SERVER_TIME_ORIGIN, ServerTime

HERE = Path(__file__).parent
BUNDLED = Path(slosched.perfmodel.__file__).parent / "bundled"

FORM = "profiled-separate"
"""The form with separate attention kernels, whose times add up, as they do in the tables."""
NUM_FITTED = 160
NUM_JUDGED = 1500
FITTED_SEED, JUDGED_SEED = 0, 1
SERVER_TIME = ServerTime(per_request_s=0.006)
"""What vLLM's server adds, as learnt from two of the runs in docs/fidelity.md."""
SERVER_TIME_SAID = (
    "by so much are the median TTFTs of two public runs of vLLM 0.15.1 with Llama-2-7B on an H100 "
    "longer than the simulator says without it and without sampling (docs/fidelity.md); taken for "
    "every GPU, as it is the host's time; not known are the times of a step"
)


@dataclass(frozen=True)
class Source:
    """The bundled name of a model, and AIConfigurator's names of its GPU and model."""

    name: str
    deployment: Deployment


_LLAMA_8B = "meta-llama/Meta-Llama-3.1-8B"
_LLAMA_70B = "meta-llama/Meta-Llama-3.1-70B"
_LLAMA_3B = str(HERE / "configs" / "Llama-3.2-3B")
_GPT_OSS_20B, _GPT_OSS_120B = "openai/gpt-oss-20b", "openai/gpt-oss-120b"
_QWEN_235B = "Qwen/Qwen3-235B-A22B"

SOURCES = (
    *(
        Source(f"{gpu}/llama-3.1-8b", Deployment(system, _LLAMA_8B))
        for gpu, system in (
            ("a100", "a100_sxm"),
            ("b200", "b200_sxm"),
            ("h100", "h100_sxm"),
            ("h200", "h200_sxm"),
            ("l40s", "l40s"),
        )
    ),
    *(
        Source(f"{gpu}/llama-3.1-70b-tp4", Deployment(f"{gpu}_sxm", _LLAMA_70B, tensor_parallel=4))
        for gpu in ("a100", "h100", "h200")
    ),
    Source("h100/qwen3-8b", Deployment("h100_sxm", "Qwen/Qwen3-8B")),
    Source("h200/qwen3-8b", Deployment("h200_sxm", "Qwen/Qwen3-8B")),
    Source("h200/qwen3-32b", Deployment("h200_sxm", "Qwen/Qwen3-32B")),
    Source("h100/gpt-oss-20b", Deployment("h100_sxm", _GPT_OSS_20B)),
    Source("l40s/gpt-oss-20b", Deployment("l40s", _GPT_OSS_20B)),
    Source("h100/gpt-oss-120b-tp2", Deployment("h100_sxm", _GPT_OSS_120B, tensor_parallel=2)),
    Source("h200/gpt-oss-120b", Deployment("h200_sxm", _GPT_OSS_120B)),
    Source("b200/gpt-oss-120b", Deployment("b200_sxm", _GPT_OSS_120B)),
    Source("h100/qwen3-30b-a3b", Deployment("h100_sxm", "Qwen/Qwen3-30B-A3B")),
    Source("h200/qwen3-30b-a3b", Deployment("h200_sxm", "Qwen/Qwen3-30B-A3B")),
    Source("b200/qwen3-235b-a22b-tp4", Deployment("b200_sxm", _QWEN_235B, tensor_parallel=4)),
    Source(
        "h200/qwen3-235b-a22b-tp8-ep8",
        Deployment("h200_sxm", _QWEN_235B, tensor_parallel=8, expert_parallel=8),
    ),
    Source(
        "h200/deepseek-v3-tp8-ep8",
        Deployment("h200_sxm", "deepseek-ai/DeepSeek-V3", tensor_parallel=8, expert_parallel=8),
    ),
    Source("l40s/llama-3.2-3b", Deployment("l40s", _LLAMA_3B)),
    *(
        Source(f"{gpu}/{name}", Deployment(gpu, model))
        for gpu in ("a30", "l4")
        for name, model in (("llama-3.1-8b", _LLAMA_8B), ("llama-3.2-3b", _LLAMA_3B))
    ),
)


def composed(source: Source, num_steps: int, seed: int) -> Profile:
    """Compose steps, or derive them where the GPU has no tables."""
    make = derive_profile if source.deployment.system in UNMEASURED else compose_profile
    return make(
        source.deployment,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        num_steps=num_steps,
        seed=seed,
    )


def fitted_steps(source: Source) -> Profile:
    """Compose the steps that the model is fitted on."""
    return composed(source, NUM_FITTED, FITTED_SEED)


def judged_steps(source: Source) -> Profile:
    """Compose other steps, which no fit has seen."""
    profile = composed(source, NUM_JUDGED, JUDGED_SEED)
    steps = tuple(m for m in profile.measurements if m.part is Part.STEP)
    return Profile(steps, profile.provenance)


def fit_and_judge(fitted: Profile, judged: Profile) -> tuple[FittedModel, ErrorReport]:
    """Fit a model to the fitted steps, and describe it by its errors on the judged ones."""
    model = fit(fitted, FORM).model
    error = report_errors(predictions(model, judged.measurements), judged.measurements)
    summary = {
        "count": error.count,
        "fitted": sum(m.part is Part.STEP for m in fitted.measurements),
        "mape": error.mape,
        "p99": error.p99,
        "under_p99": error.under_p99,
    }
    return with_server_time(
        with_derivation_error(described(model, model.provenance, summary))
    ), error


def with_server_time(model: FittedModel) -> FittedModel:
    """Return the model with what vLLM's server adds to it."""
    facts = {**model.provenance, SERVER_TIME_ORIGIN: SERVER_TIME_SAID}
    return described(model, facts, model.held_out_error, server_time=SERVER_TIME)


def main(
    csvs: Annotated[Path, typer.Option(help="where the fitted steps go")] = HERE,
    out: Annotated[Path, typer.Option(help="where the models go")] = BUNDLED,
    judged: Annotated[Path | None, typer.Option(help="also write the judged steps here")] = None,
    only: Annotated[str, typer.Option(help="names of the models to make start with this")] = "",
) -> None:
    """Compose, fit, judge and save the model of every source."""
    for source in SOURCES:
        if not source.name.startswith(only):
            continue
        to_fit, to_judge = fitted_steps(source), judged_steps(source)
        write_profile(to_fit, _ready(csvs / f"{source.name}.csv"))
        if judged is not None:
            write_profile(to_judge, _ready(judged / f"{source.name}.csv"))
        model, error = fit_and_judge(to_fit, to_judge)
        save_model(model, _ready(out / f"{source.name}.json"))
        typer.echo(
            f"{source.name:28} MAPE {error.mape:4.2f} %, p50 {error.p50:4.2f} %, "
            f"p90 {error.p90:4.2f} %, p99 {error.p99:4.2f} %, under p99 {error.under_p99:4.2f} %"
        )


def _ready(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


if __name__ == "__main__":
    typer.run(main)
