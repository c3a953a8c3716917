"""Profiles of the model under each backend, the latency models fitted to them, and their errors."""

from __future__ import annotations

import gc
from pathlib import Path

import pandas as pd
import torch

from profiling.gpu.backends import runnable
from profiling.gpu.results import ResultsError
from profiling.gpu.scale import Scale
from slosched.cli.local_model import LocalModel
from slosched.cli.profile_run import ProfileRun, run_profile
from slosched.core import BatchShape
from slosched.perfmodel import FittedModel, fit, load_model, read_profile, save_model


def profile(scale: Scale, out: Path) -> None:
    """Measure the planned batches under every backend; go on where an earlier run ended."""
    backends = runnable(scale)
    for name, block_size in backends.items():
        run = ProfileRun(
            num_batches=scale.num_batches,
            max_passes=scale.max_passes,
            time_limit_s=scale.time_limit_s / len(backends),
            max_context_tokens=scale.max_context_tokens,
        )
        run_profile(scale.open(name, block_size), scale.limits, out / f"profile-{name}.csv", run)
        free_memory()


def fit_all(_scale: Scale, out: Path) -> None:
    """Fit a latency model to every profile; write the errors on steps that were not fitted."""
    errors = []
    for path in sorted(out.glob("profile-*.csv")):
        report = fit(read_profile(path))
        name = path.stem.removeprefix("profile-")
        save_model(report.model, out / f"model-{name}.json")
        for regime, error in {"all": report.held_out, **report.by_regime}.items():
            errors.append(
                (name, report.model.form, regime, error.count, error.mape, error.p99, error.bias)
            )
    if not errors:
        raise ResultsError(f"{out} holds no profile: run the stage `profile` first")
    columns = ["backend", "form", "regime", "steps", "mape", "p99", "bias"]
    pd.DataFrame(errors, columns=columns).to_csv(out / "fit.csv", index=False)


def fastest(scale: Scale, out: Path) -> tuple[str, FittedModel]:
    """Return the backend whose fitted model predicts the shortest full step, and that model."""
    paths = sorted(out.glob("model-*.json"))
    if not paths:
        raise ResultsError(f"{out} holds no fitted model: run the stage `fit` first")
    decodes = scale.limits.max_num_seqs // 2
    step = BatchShape()
    step.add(scale.limits.max_num_batched_tokens - decodes, 0)
    for _ in range(decodes):
        step.add(1, scale.max_context_tokens // 16)
    models = {path.stem.removeprefix("model-"): load_model(path) for path in paths}
    name = min(models, key=lambda name: models[name].predict(step))
    return name, models[name]


def open_fastest(scale: Scale, out: Path) -> tuple[LocalModel, FittedModel]:
    """Load the model with the backend of the shortest steps; return it and its latency model."""
    name, model = fastest(scale, out)
    return scale.open(name, int(model.provenance["block_size"])), model


def free_memory() -> None:
    """Give the memory of models that are no longer used back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
