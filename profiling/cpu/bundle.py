"""Fits and bundles the latency model of the embedded model on the CPU that measured it.

sh profiling/cpu/measure.sh && python profiling/cpu/bundle.py
"""

from __future__ import annotations

from pathlib import Path

import typer

import slosched.perfmodel
from slosched.perfmodel import Profile, fit, read_profile, save_model

HERE = Path(__file__).parent
BUNDLED = Path(slosched.perfmodel.__file__).parent / "bundled" / "cpu" / "smollm2-135m.json"

_ORIGIN = {
    "origin": "measured on CPU",
    "source": "profiling/cpu/profile.csv, by profiling/cpu/measure.sh",
    "licence": "Apache-2.0, the slosched authors",
    "method": "whole steps of slosched's torch engine on one thread, wall clock, in passes over 60 "
    "batches; drift of the shared machine taken out by a reference batch",
    "not_in_it": "planning, HTTP, sampling with anything but the greatest logit",
    "kv_capacity_origin": "as it was served",
}


def profile() -> Profile:
    """Return the measurements, with all the provenance that a bundled model has."""
    measured = read_profile(HERE / "profile.csv")
    return Profile(measured.measurements, {**measured.provenance, **_ORIGIN})


def main() -> None:
    """Fit the model and save it."""
    report = fit(profile())
    BUNDLED.parent.mkdir(parents=True, exist_ok=True)
    save_model(report.model, BUNDLED)
    error = report.held_out
    typer.echo(
        f"{report.model.form}: MAPE {error.mape:.1f} %, p99 {error.p99:.1f} %, wrote {BUNDLED}"
    )


if __name__ == "__main__":
    typer.run(main)
