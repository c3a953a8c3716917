"""`slosched profile --from …`: a profile composed of published measurements of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from slosched.cli.console import console
from slosched.perfmodel import write_profile
from slosched.perfmodel.aiconfigurator import Deployment, compose_profile

_FLAGS = {"system": "--system", "backend": "--backend", "tp": "--tp"}


class Origin(StrEnum):
    """The source of the measurements."""

    AICONFIGURATOR = "aiconfigurator"


@dataclass(frozen=True)
class SourceOptions:
    """The options of `profile --from`. `--model` is the name that the source has for the model."""

    origin: Annotated[
        Origin | None,
        typer.Option(
            "--from",
            help="Measure nothing: compose the profile from the operator times that NVIDIA "
            "AIConfigurator publishes (needs the extra `aiconfigurator`).",
        ),
    ] = None
    system: Annotated[
        str | None,
        typer.Option(
            help="With --from: the GPU, such as h200_sxm, h100_sxm, a100_sxm, b200_sxm or l40s."
        ),
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(help="With --from: the engine, vllm (the default), sglang or trtllm."),
    ] = None
    tp: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --from: number of GPUs that share each layer (tensor parallelism).  "
            "Default: 1.",
        ),
    ] = None

    def __post_init__(self) -> None:
        given = [flag for name, flag in _FLAGS.items() if getattr(self, name) is not None]
        if self.origin is None and given:
            raise ValueError(f"{given[0]} belongs to --from; without it this device is measured")
        if self.origin is not None and self.system is None:
            raise ValueError("--from needs --system, the GPU: --system h200_sxm, say")

    def compose(self, model: str, out: Path, seed: int, overwrite: bool) -> None:
        """Compose the profile of `model` and write it to `out`."""
        assert self.system is not None
        if out.exists() and not overwrite:
            raise ValueError(f"{out} exists; name another file, or replace it with --overwrite")
        deployment = Deployment(self.system, model, self.backend or "vllm", self.tp or 1)
        composed = compose_profile(deployment, seed=seed)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_profile(composed, out)
        console.print(f"wrote {len(composed.measurements)} composed measurements to {out}")
        console.print(f"not in them: {composed.provenance['not_in_it']}")
