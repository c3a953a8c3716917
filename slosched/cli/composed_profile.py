"""`slosched profile --from …`: a profile composed of published measurements of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from slosched.cli.backend_table import warn_of_doubts, with_chosen_backend
from slosched.cli.console import console
from slosched.cli.derivation_note import print_derivation
from slosched.cli.options import LimitOptions, is_given
from slosched.perfmodel import write_profile
from slosched.perfmodel.aiconfigurator import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    UNMEASURED,
    Deployment,
    asks_for_top_p,
    compose_profile,
    config_folder,
    derive_profile,
    system_of,
)

_NUM_STEPS = 160
_NO_SAMPLING = "greedy, takes no time (--sampling top-p counts the sorting of logits)"
_FLAGS = {
    "gpu": "--gpu",
    "backend": "--backend",
    "tp": "--tp",
    "ep": "--ep",
    "sampling": "--sampling",
}


_STEPS = ("max_num_batched_tokens", "max_num_seqs", "seed")
HEEDED_BY_FROM = frozenset(("origin", "model", "words", "out", "overwrite", *_FLAGS, *_STEPS))
"""The options of `profile` that have an effect beside --from."""


class Origin(StrEnum):
    """The source of the measurements."""

    AICONFIGURATOR = "aiconfigurator"


class Sampling(StrEnum):
    """How requests are sampled."""

    GREEDY = "greedy"
    TOP_P = "top-p"


@dataclass(frozen=True)
class ComposedRun:
    """The range of the steps to compose, and what to do with an existing file."""

    max_num_batched_tokens: int
    max_num_seqs: int
    seed: int
    overwrite: bool

    @classmethod
    def of(
        cls, context: typer.Context, limits: LimitOptions, seed: int, overwrite: bool
    ) -> ComposedRun:
        """Take the limits that were given; the others are those of the tables, not of a device."""
        tokens, seqs = MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
        if is_given(context, "max_num_batched_tokens"):
            tokens = limits.max_num_batched_tokens
        if is_given(context, "max_num_seqs"):
            seqs = limits.max_num_seqs
        return cls(tokens, seqs, seed, overwrite)


@dataclass(frozen=True)
class SourceOptions:
    """The options of `profile --from`.

    `--model` is a name on the Hugging Face hub, or a folder with a config.json.
    """

    origin: Annotated[
        Origin | None,
        typer.Option(
            "--from",
            help="Measure nothing: compose the profile from the operator times that NVIDIA "
            "AIConfigurator publishes (needs the extra `aiconfigurator`).",
        ),
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(
            help="With --from: the GPU, such as h100, h200, b200, a100 or l40s.  The times of l4, "
            "a30, rtx3090 and others, which have no tables, are derived from those of these."
        ),
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(
            help="With --from: the engine whose kernels are taken, vllm, sglang or trtllm.  "
            "Default: the first of these whose tables are plausible for the model."
        ),
    ] = None
    tp: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --from: number of GPUs that share each layer (tensor parallelism).  "
            "Default: 1.",
        ),
    ] = None
    ep: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --from, for a mixture of experts: number of groups into which the --tp GPUs "
            "are divided; each group holds other experts (expert parallelism).  Default: 1.",
        ),
    ] = None

    sampling: Annotated[
        Sampling | None,
        typer.Option(
            help="With --from: whether requests are sampled with top-p, for which vLLM sorts all "
            "logits of a step.  Default: as the model's generation_config.json says, if there is "
            "one."
        ),
    ] = None

    def __post_init__(self) -> None:
        given = [flag for name, flag in _FLAGS.items() if getattr(self, name) is not None]
        if self.origin is None and given:
            raise ValueError(f"{given[0]} belongs to --from; without it this device is measured")
        if self.origin is not None and self.gpu is None:
            raise ValueError("--from needs --gpu, the GPU: --gpu h100, say")

    def _samples_top_p(self, model: str) -> bool:
        """Tell whether to count top-p: as asked for, else as the model's own defaults are."""
        if self.sampling is not None:
            return self.sampling is Sampling.TOP_P
        return asks_for_top_p(Path(config_folder(model))) is True

    def compose(self, model: str, out: Path, run: ComposedRun) -> None:
        """Compose the profile of `model` and write it to `out`."""
        assert self.gpu is not None
        if out.exists() and not run.overwrite:
            raise ValueError(f"{out} exists; name another file, or replace it with --overwrite")
        system, backend = system_of(self.gpu), self.backend or "vllm"
        deployment = Deployment(system, model, backend, self.tp or 1, self.ep or 1)
        deployment = replace(deployment, samples_top_p=self._samples_top_p(model))
        if system in UNMEASURED:
            console.print(f"no tables of {self.gpu}: deriving its times from those of other GPUs …")
        elif self.backend is None:
            deployment = with_chosen_backend(deployment)
        else:
            warn_of_doubts(deployment)
        composed = (derive_profile if system in UNMEASURED else compose_profile)(
            deployment,
            max_num_batched_tokens=run.max_num_batched_tokens,
            max_num_seqs=run.max_num_seqs,
            num_steps=_NUM_STEPS,
            seed=run.seed,
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        write_profile(composed, out)
        said = composed.provenance
        console.print(
            f"wrote {len(composed.measurements)} composed measurements to {out}", markup=False
        )
        console.print(f"{said['engine']}; range: {said['range']}")
        console.print(f"sampling: {said.get('sampling', _NO_SAMPLING)}")
        console.print(f"not in them: {said['not_in_it']}")
        print_derivation(said)
