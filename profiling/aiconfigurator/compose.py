"""Latency models of data-centre GPUs from AIConfigurator's operator tables, fitted and bundled.

    pip install 'slosched[aiconfigurator]'
    python profiling/aiconfigurator/compose.py

Writes one CSV a source beside itself (the steps that are fitted, and the layers at every tile edge)
and the fitted model into the package.  The steps that a model is judged on are composed anew each
time: `--test FOLDER` keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import slosched.perfmodel
from slosched.perfmodel import write_profile
from slosched.perfmodel.aiconfigurator import Deployment, compose_profile
from slosched.perfmodel.measurement import Part, Profile

HERE = Path(__file__).parent
BUNDLED = Path(slosched.perfmodel.__file__).parent / "bundled"

NUM_FITTED = 160
NUM_JUDGED = 1500
FITTED_SEED, JUDGED_SEED = 0, 1


@dataclass(frozen=True)
class Source:
    """A bundled name, and what AIConfigurator calls that GPU and model."""

    name: str
    deployment: Deployment


_LLAMA_8B = "meta-llama/Meta-Llama-3.1-8B"
_LLAMA_70B = "meta-llama/Meta-Llama-3.1-70B"

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
)


def fitted_steps(source: Source) -> Profile:
    """What the model is fitted on."""
    return compose_profile(source.deployment, num_steps=NUM_FITTED, seed=FITTED_SEED)


def judged_steps(source: Source) -> Profile:
    """Other steps, which no fit has seen."""
    profile = compose_profile(source.deployment, num_steps=NUM_JUDGED, seed=JUDGED_SEED)
    steps = tuple(m for m in profile.measurements if m.part is Part.STEP)
    return Profile(steps, profile.provenance)


def main(
    csvs: Annotated[Path, typer.Option(help="where the fitted steps go")] = HERE,
    test: Annotated[Path | None, typer.Option(help="also write the judged steps here")] = None,
) -> None:
    """Compose every source."""
    for source in SOURCES:
        _write(fitted_steps(source), csvs / f"{source.name}.csv")
        if test is not None:
            _write(judged_steps(source), test / f"{source.name}.csv")
        typer.echo(source.name)


def _write(profile: Profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_profile(profile, path)


if __name__ == "__main__":
    typer.run(main)
